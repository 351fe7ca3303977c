"""Inside a Python worker of Spark: what makes many short tasks cheap, and its end quiet.

Spark forks a worker from a daemon and reuses it for task after task. Nothing here happens in any other process.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any, Final

from plait.memory import keep_buffers

#: The module whose children Spark's workers are.
_DAEMON: Final = "pyspark.daemon"

#: A fork takes it over, with what was done. The collector would know, too, and counts all that it spares to tell.
_prepared = False


def prepare_worker() -> None:
    """Once in each worker; nothing anywhere else."""
    main = sys.modules["__main__"]
    started_as = getattr(main, "__spec__", None)
    is_daemon = started_as is not None and started_as.name == _DAEMON
    if not is_daemon and _DAEMON not in sys.modules:
        return
    global _prepared
    if _prepared:
        return
    _prepared = True
    # A worker collects all garbage after every task. Looking through what Spark, Arrow and Plait have loaded takes it
    # 20 to 40 ms each time, a third of what a task of average size takes: none of that is garbage, now or later.
    gc.collect()
    gc.freeze()
    # What brokers send comes in buffers of a MiB: memory that is mapped anew for each costs a third of reading it.
    keep_buffers()
    if is_daemon:
        _end_quietly(main)


def _end_quietly(daemon: Any) -> None:
    """When Java has hung up, as it does after a minute without work, end without the traceback of a broken pipe."""
    work = daemon.worker

    def work_quietly(*arguments: Any) -> Any:
        try:
            return work(*arguments)
        except BrokenPipeError:
            os._exit(1)

    daemon.worker = work_quietly
