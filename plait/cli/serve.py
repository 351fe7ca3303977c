"""``plait serve``: a node in the foreground.

Standard output gets exactly one line, which starts with ``ready``, once clients are served. Everything else, recovery
and damage first, goes to standard error. SIGTERM and SIGINT drain and end with 0; storage that fails ends the process
with 9, because what it could not write it must not keep in memory and acknowledge.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shlex
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from plait.broker.config import BrokerConfig
from plait.broker.recover import RecoveryReport
from plait.cli.files import fit, raise_limit, segment_count
from plait.cli.loop import run_loop
from plait.cli.memory import keep_buffers
from plait.cli.options import Lease, duration_of, lease_of, size_of
from plait.cli.output import words_of_size
from plait.errors import DataDirError, InvalidArgument, StorageFailed
from plait.limits import ServerLimits
from plait.server.health import Health
from plait.server.host import Server
from plait.server.standing import database_in
from plait.storage.disk import RealDisk
from plait.storage.log import SEGMENT_SIZE_MIN
from plait.version import VERSION

log = logging.getLogger("plait.serve")

#: A recovery that takes longer says so, this often.
RECOVERY_SECONDS = 2.0
#: A failed disk may also hang: the process ends without it then.
ABANDON_SECONDS = 5.0
#: One Ctrl-C may come twice, from the terminal and from a parent; only a later one is a second one.
IMPATIENCE_SECONDS = 1.0
EXIT_ABANDONED = 130


def serve(
    *,
    data: Annotated[Path, Parameter(help="The data directory; made if it is not there.")],
    port: Annotated[int, Parameter(help="0 takes a free one; the ready line names it.")] = 7450,
    http: Annotated[
        int | None, Parameter(help="A port for GET /health over HTTP; 0 takes a free one. Without it there is none.")
    ] = None,
    host: Annotated[str, Parameter(help="The address to listen on: loopback, as there is no authentication.")] = (
        "127.0.0.1"
    ),
    flush: Annotated[
        Literal["async", "sync"],
        Parameter(
            help="sync: acknowledge when durable. async: when written; a loss of power may take the last 500 ms."
        ),
    ] = "async",
    segment_size: Annotated[str, Parameter(help="Bytes of one file of the message log.")] = "1GiB",
    retention: Annotated[
        str, Parameter(help="How long subjects that say nothing else keep messages; 'forever' keeps them.")
    ] = "72h",
    dead_retention: Annotated[
        str, Parameter(help="How long dead letters are kept; 'forever' keeps them until they are purged.")
    ] = "30d",
    lease: Lease = "10s",
    auto_create: Annotated[
        bool, Parameter(negative="--no-auto-create", help="Whether the first use of a subject creates it.")
    ] = True,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Parameter(help="Of standard error.")] = "info",
) -> int:
    """Run a node on a data directory, until SIGTERM or Ctrl-C."""
    logging.basicConfig(
        stream=sys.stderr, level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if not 0 <= port < 65536:
        raise InvalidArgument(f"port {port} is not one; use 1 to 65535, or 0 for a free one")
    config = BrokerConfig(
        flush=flush,
        message_segment_size=_segment_size(segment_size),
        retention_seconds=None if retention == "forever" else duration_of(retention),
        dead_seconds=None if dead_retention == "forever" else duration_of(dead_retention),
        auto_create=auto_create,
        limits=fit(ServerLimits(lease_seconds=lease_of(lease)), raise_limit(), segment_count(data)),
    )
    keep_buffers()
    return run_loop(_serve(data, host, port, http, config))


def _segment_size(text: str) -> int:
    size = size_of(text)
    if size < SEGMENT_SIZE_MIN:
        raise InvalidArgument(
            f"--segment-size {text} is too small: a segment holds any frame, {SEGMENT_SIZE_MIN} bytes"
        )
    return size


async def _serve(data: Path, host: str, port: int, http: int | None, config: BrokerConfig) -> int:
    stop = _stop_on_signals()
    server = Server(RealDisk(data), config, host=host, port=port, meta=database_in(data))
    health = None if http is None else Health(server, http)
    _check_free(host, port)
    _check_free(host, http or 0)
    report = await _start(server, data)
    _tell_limits(config.limits)
    if health is not None:
        await health.start()
    assert server.failed is not None
    facts = (
        f"data={shlex.quote(str(data))} flush={config.flush} epoch={report.epoch} pid={os.getpid()} version={VERSION}"
    )
    if health is not None:
        facts += f" http=http://{host}:{health.port}/health"
    with contextlib.suppress(BrokenPipeError):
        print(f"ready {server.address} {facts}", flush=True)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((stopping, server.failed), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if health is not None:
        await health.stop()
    if not server.failed.done():
        log.info("draining")
        try:
            await server.stop()
        except OSError as error:
            raise StorageFailed(f"the last checkpoint could not be written ({error}); start again to recover") from None
        log.info("stopped")
    if server.failed.done():
        return await _abandon(server, server.failed.result())
    return 0


def _stop_on_signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; a later one ends the process at once, which a crash-safe log survives."""
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


async def _abandon(server: Server, failure: StorageFailed) -> int:
    """Storage failed: nothing more is acknowledged, and the process ends, with its disk or without."""
    sys.stderr.write(f"error: {failure.message} ({failure.code})\n")
    sys.stderr.flush()
    try:
        await asyncio.wait_for(server.stop(), ABANDON_SECONDS)
    except (TimeoutError, OSError):
        os._exit(failure.exit_code)
    return failure.exit_code


def _check_free(host: str, port: int) -> None:
    """Say that a port is taken before a recovery, not after it."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise _cannot_listen(host, port, error) from None


def _cannot_listen(host: str, port: int, error: OSError) -> InvalidArgument:
    if error.errno == errno.EADDRINUSE:
        return InvalidArgument(f"port {port} of {host} is in use by another process; choose another with --port")
    return InvalidArgument(f"cannot listen on {host}, port {port}: {error.strerror or error}")


async def _start(server: Server, data: Path) -> RecoveryReport:
    begun = time.monotonic()
    starting = asyncio.ensure_future(server.start())
    try:
        while not (await asyncio.wait((starting,), timeout=RECOVERY_SECONDS))[0]:
            log.info("recovering %s: %.0f s, %d subjects so far", data, time.monotonic() - begun, _subjects(server))
        report = starting.result()
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            raise _cannot_listen(server.host, server.port, error) from None
        raise DataDirError(f"data directory {data} cannot be used: {error}") from error
    _tell(report, data, time.monotonic() - begun)
    return report


def _subjects(server: Server) -> int:
    # The broker comes into being during the start.
    return len(server.broker.subjects) if hasattr(server, "broker") else 0


def _tell_limits(limits: ServerLimits) -> None:
    """That less is served than wanted, and what to do about it."""
    wanted = ServerLimits()
    if (limits.connections, limits.open_maps) != (wanted.connections, wanted.open_maps):
        log.warning(
            "too few files may be open: %d connections are served instead of %d, %d consume logs kept open instead of "
            "%d; raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd) and start again",
            limits.connections,
            wanted.connections,
            limits.open_maps,
            wanted.open_maps,
        )


def _tell(report: RecoveryReport, data: Path, seconds: float) -> None:
    """What the start found, to standard error."""
    how = "clean start" if report.clean else "recovered"
    log.info(
        "%s in %.2f s: epoch %d, %s of log read, %d frames, %d events",
        how,
        seconds,
        report.epoch,
        words_of_size(report.scanned_bytes),
        report.frames,
        report.events,
    )
    for rejected in report.rejected_checkpoints:
        log.warning("checkpoint %s; the one before was used", rejected)
    if report.rebuilt_consume_logs:
        log.warning("%d consume logs were built anew from the message log", report.rebuilt_consume_logs)
    damaged = 0
    for damage in report.damages:
        where = f"{damage.log} log, offset {damage.offset}, {damage.size} bytes: {damage.reason}"
        if damage.kind == "torn":
            log.warning("unfinished tail cut, %s; the bytes are in quarantine/", where)
        else:
            damaged += 1
            log.error("DAMAGE, %s; left in place and skipped, a copy is in quarantine/", where)
    if damaged:
        log.error("%d damaged regions: run 'plait doctor %s' to see what they held", damaged, data)
