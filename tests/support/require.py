"""Requirements of tests on the machine: root, namespaces, a package, a server.

If a requirement is missing, the test is skipped with the reason. With ``PLAIT_REQUIRE=all`` in the environment, as in
continuous integration, the test fails instead, so that no test is skipped unnoticed.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import subprocess
from types import ModuleType
from typing import NoReturn

import pytest


def everything_required() -> bool:
    """True if a skipped test counts as a failure."""
    return os.environ.get("PLAIT_REQUIRE", "") == "all"


def unavailable(reason: str) -> NoReturn:
    """End the running test: skip it with the reason, or fail it if everything is required."""
    if everything_required():
        pytest.fail(f"PLAIT_REQUIRE=all, but {reason}", pytrace=False)
    pytest.skip(reason)


def require(available: object, reason: str) -> None:
    """Skip or fail the test unless `available` is true; `reason` names what is missing and how to get it."""
    if not available:
        unavailable(reason)


def require_root() -> None:
    """Skip or fail the test unless it runs as root."""
    require(os.geteuid() == 0, "this needs root")


def require_namespaces() -> None:
    """Skip or fail the test where network namespaces cannot be made."""
    require_root()
    require_program("ip", package="iproute2")
    require(_can_unshare(), "this needs the right to make network namespaces (CAP_SYS_ADMIN)")


def require_mounts() -> None:
    """Skip or fail the test where file systems cannot be mounted."""
    require_root()
    require(_can_unshare("--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"), "this needs the right to mount")


def require_program(name: str, *, package: str | None = None) -> str:
    """The path of a program; `package` is the Debian package that installs it."""
    path = shutil.which(name, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")
    if path is None:
        unavailable(f"{name} is not installed (tools/debian-install {package or name})")
    return path


def require_package(name: str, *, extra: str = "dev") -> ModuleType:
    """The module `name`, which the optional dependencies `extra` install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        unavailable(f"the package {name} is not installed (pip install 'plait[{extra}]'): {error}")


@functools.cache
def _can_unshare(flag: str = "--net", *command: str) -> bool:
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    return subprocess.run([unshare, flag, *(command or ("true",))], capture_output=True).returncode == 0
