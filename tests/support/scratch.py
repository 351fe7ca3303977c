"""Where a process that is to be killed has its passing files."""

from __future__ import annotations

import os
from pathlib import Path


def scratch_environ(directory: Path) -> dict[str, str]:
    """An environment in which Python, Java and Spark have their passing files below a test's directory.

    Who is killed removes nothing, and the machine's temporary directory would fill with blocks and native libraries.
    """
    scratch = directory / "scratch"
    scratch.mkdir(exist_ok=True)
    # Libraries of compression are unpacked where Java says.
    java = f'"-Djava.io.tmpdir={scratch}"'
    return os.environ | {"TMPDIR": str(scratch), "SPARK_LOCAL_DIRS": str(scratch), "JDK_JAVA_OPTIONS": java}
