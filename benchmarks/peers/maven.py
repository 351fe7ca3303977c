"""Servers that Debian does not ship, taken from Maven Central with Maven itself.

Maven keeps what it downloads in its own local repository, so only the first run needs Maven Central.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.errors import PeerUnavailable

DOWNLOAD_SECONDS_MAX = 600.0
ERROR_TAIL_SIZE = 600


def copy_jars(artefacts: Sequence[str], directory: Path) -> Path:
    """Put the artefacts (`group:artefact:version`) with their dependencies into `directory`; return the folder.

    Raises PeerUnavailable where Java or Maven is missing, or Maven Central cannot be reached.
    """
    for program, package in (("java", "default-jre-headless"), ("mvn", "maven")):
        if shutil.which(program) is None:
            raise PeerUnavailable(f"{program} not found on the PATH; tools/debian-install {package}")
    (directory / "pom.xml").write_text(_pom(artefacts))
    jars = directory / "jars"
    try:
        answer = subprocess.run(
            [
                "mvn",
                "--batch-mode",
                "--quiet",
                "dependency:copy-dependencies",
                "-DincludeScope=runtime",
                f"-DoutputDirectory={jars}",
            ],
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_SECONDS_MAX,
        )
    except subprocess.TimeoutExpired:
        raise PeerUnavailable(f"Maven did not finish within {DOWNLOAD_SECONDS_MAX:.0f} s") from None
    if answer.returncode != 0:
        detail = (answer.stdout + answer.stderr)[:ERROR_TAIL_SIZE]
        raise PeerUnavailable(f"Maven could not get {', '.join(artefacts)}: {detail}")
    return jars


def _pom(artefacts: Sequence[str]) -> str:
    dependencies = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId>"
        f"<version>{version}</version></dependency>"
        for group, name, version in (artefact.split(":") for artefact in artefacts)
    )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>benchmark</groupId><artifactId>benchmark</artifactId><version>1</version>"
        f"<dependencies>{dependencies}</dependencies></project>\n"
    )
