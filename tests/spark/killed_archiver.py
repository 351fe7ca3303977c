"""An archiver that kills itself: run as a program, it ends by SIGKILL at one of its steps.

``python -m tests.spark.killed_archiver DATA ARCHIVE STEP [spark]``: a step is a call of a function of Plait in the
driver. With step 0 it runs to its end and prints the number of steps. Without ``spark`` the tasks run in the driver, so
that their steps count as well.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

from plait.spark.archiving import archiver as archiving
from tests.spark.archives import run_here

#: The modules whose calls are counted.
PLACES = tuple(os.sep + place for place in ("spark" + os.sep, "storage" + os.sep + "marks.py"))


class Steps:
    """Counts steps, and ends the process at one of them."""

    def __init__(self, last: int) -> None:
        self.count = 0
        self._last = last

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not any(place in frame.f_code.co_filename for place in PLACES):
            return
        self.count += 1
        if self.count == self._last:
            os.kill(os.getpid(), signal.SIGKILL)


def main(data: str, to: str, last: str, how: str = "") -> None:
    spark: Any = object()
    if how == "spark":
        from plait.spark import session

        # Started before steps are counted.
        spark = session("plait-killed", master="local[2]", config={"spark.driver.extraJavaOptions": "-XX:+UseSerialGC"})
    else:
        archiving.run_job = run_here
    steps = Steps(int(last))
    sys.setprofile(steps)
    archiving.archive(data, to, spark=spark, now=True, compact=True)
    sys.setprofile(None)
    print(steps.count)


if __name__ == "__main__":
    main(*sys.argv[1:])
