"""The common parts of servers in the foreground: signals, ports, open files, pauses, the ready line and the log.

Standard output gets exactly one line, which starts with ``ready``, once clients are served. Everything else goes to
standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import socket
import sys
from typing import Annotated, Literal

from plait.cli.options import described
from plait.errors import InvalidArgument
from plait.version import VERSION

#: One Ctrl-C may arrive twice, from the terminal and from a parent. A signal counts as a second one after this time.
IMPATIENCE_SECONDS = 1.0
EXIT_ABANDONED = 130
#: A computing thread lets another one run after this time. With the default of 5 ms, an event loop would wait that long
#: after each of its system calls while another thread is busy.
SWITCH_SECONDS = 0.0002
#: New objects before a collection of the youngest generation, collections of it before one of the second generation,
#: and of that before one of the oldest. The second generation then has some 20,000 objects. With 200,000 of them, a
#: broker of 100,000 subjects paused for 137 ms.
THRESHOLDS = (5_000, 4, 500)

Port = Annotated[int, described("The port; 0 takes a free one, which the ready line shows.")]
Host = Annotated[str, described("The address to listen on. There is no authentication: the default is loopback.")]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], described("The log level on standard error.")]

DEFAULT_HOST = "127.0.0.1"


def start_logging(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def check_port(port: int) -> None:
    if not 0 <= port < 65536:
        raise InvalidArgument(f"port {port} is out of range; use 1 to 65535, or 0 for a free one")


def check_free(host: str, port: int) -> None:
    """Raise ``InvalidArgument`` if a port is taken: before a long start, not after it."""
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
    """The error for a port that cannot be opened."""
    if error.errno == errno.EADDRINUSE:
        return InvalidArgument(f"port {port} of {host} is in use by another process; choose another with --port")
    return InvalidArgument(f"cannot listen on {host}, port {port}: {error.strerror or error}")


def is_about_port(error: OSError) -> bool:
    return error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)


def stop_on_signals() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets. A second one ends the process at once; stored data survives."""
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


def print_ready(address: str, facts: str, more: str = "") -> None:
    """Print the ready line: address, ``facts``, the fields common to all servers, ``more``."""
    with contextlib.suppress(BrokenPipeError):
        print(f"ready {address} {facts} pid={os.getpid()} version={VERSION}{more}", flush=True)


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard limit, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems refuse the hard limit that they report; then the soft limit stays.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def keep_pauses_short() -> None:
    """Shorten waits of one thread for another, and garbage collection. Call it when a server is ready: objects that
    exist by now are excluded from garbage collection.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
