"""What every server does that runs in the foreground: signals, ports, its ready line and its log.

Standard output gets exactly one line, which starts with ``ready``, once clients are served. Everything else goes to
standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from plait.errors import InvalidArgument
from plait.version import VERSION

#: One Ctrl-C may come twice, from the terminal and from a parent; only a later one is a second one.
IMPATIENCE_SECONDS = 1.0
EXIT_ABANDONED = 130

Port = Annotated[int, Parameter(help="0 takes a free one; the ready line names it.")]
Host = Annotated[str, Parameter(help="The address to listen on: loopback, as there is no authentication.")]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], Parameter(help="Of standard error.")]

DEFAULT_HOST = "127.0.0.1"


def begin_log(level: str) -> None:
    """Log to standard error from now on."""
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def check_port(port: int) -> None:
    """Refuse what is no port."""
    if not 0 <= port < 65536:
        raise InvalidArgument(f"port {port} is not one; use 1 to 65535, or 0 for a free one")


def check_free(host: str, port: int) -> None:
    """Say that a port is taken before a long start, not after it."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise cannot_listen(host, port, error) from None


def cannot_listen(host: str, port: int, error: OSError) -> InvalidArgument:
    """Why a port cannot be had."""
    if error.errno == errno.EADDRINUSE:
        return InvalidArgument(f"port {port} of {host} is in use by another process; choose another with --port")
    return InvalidArgument(f"cannot listen on {host}, port {port}: {error.strerror or error}")


def is_about_port(error: OSError) -> bool:
    """Whether it says that a port cannot be had."""
    return error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)


def stop_on_signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; a later one ends the process at once, which whatever is stored survives."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    first_at = 0.0

    def stop_now() -> None:
        nonlocal first_at
        if not stop.is_set():
            first_at = loop.time()
            stop.set()
        elif loop.time() - first_at >= IMPATIENCE_SECONDS:
            os._exit(EXIT_ABANDONED)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_now)
    return stop


def say_ready(address: str, facts: str, more: str = "") -> None:
    """The one line of standard output: what is the same for all servers stands between the facts and ``more``."""
    with contextlib.suppress(BrokenPipeError):
        print(f"ready {address} {facts} pid={os.getpid()} version={VERSION}{more}", flush=True)
