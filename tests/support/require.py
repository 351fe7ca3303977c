"""What a test needs of the machine: root, namespaces, a package, a server.

Where it is not to be had the test is skipped with the reason; with ``PLAIT_REQUIRE=all`` in the environment
(continuous integration) the want of it fails the test instead, so nothing is left out unnoticed.
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
    """Whether a skip counts as a failure."""
    return os.environ.get("PLAIT_REQUIRE", "") == "all"


def unavailable(reason: str) -> NoReturn:
    """End the running test: skipped with the reason, or failed where everything is required."""
    if everything_required():
        pytest.fail(f"PLAIT_REQUIRE=all, but {reason}", pytrace=False)
    pytest.skip(reason)


def require(available: object, reason: str) -> None:
    """Go on only if `available` is true; `reason` says what is missing and how to get it."""
    if not available:
        unavailable(reason)


def require_root() -> None:
    """Go on only as root."""
    require(os.geteuid() == 0, "this needs root")


def require_namespaces() -> None:
    """Go on only where network namespaces can be made."""
    require_root()
    require_program("ip", package="iproute2")
    require(_can_unshare(), "this needs the right to make network namespaces (CAP_SYS_ADMIN)")


def require_mounts() -> None:
    """Go on only where file systems can be mounted."""
    require_root()
    require(_can_unshare("--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"), "this needs the right to mount")


def require_program(name: str, *, package: str | None = None) -> str:
    """The path of a program; `package` is Debian's name for what brings it."""
    path = shutil.which(name, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")
    if path is None:
        unavailable(f"{name} is not installed (tools/debian-install {package or name})")
    return path


def require_package(name: str, *, extra: str = "dev") -> ModuleType:
    """The module `name`, which the optional dependencies `extra` bring."""
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
