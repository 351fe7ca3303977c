"""A temporary directory for a process that will be killed."""

from __future__ import annotations

import os
from pathlib import Path


def scratch_environ(directory: Path) -> dict[str, str]:
    """An environment in which Python, Java and Spark have their temporary files below a test's directory.

    A killed process does not remove its temporary files, and would fill the machine's temporary directory.
    """
    scratch = directory / "scratch"
    scratch.mkdir(exist_ok=True)
    # Compression libraries are unpacked into Java's temporary directory.
    java = f'"-Djava.io.tmpdir={scratch}"'
    return os.environ | {"TMPDIR": str(scratch), "SPARK_LOCAL_DIRS": str(scratch), "JDK_JAVA_OPTIONS": java}
