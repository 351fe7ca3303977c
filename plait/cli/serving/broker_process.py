"""A broker in the foreground, in any cluster role: its options, its start and its end.

SIGTERM and SIGINT drain it and end the process with code 0. Failed storage ends the process with code 9: a broker must
not acknowledge what it could not write.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from plait import tasks
from plait.broker.config import BrokerConfig
from plait.broker.recovery.start_up import RecoveryReport
from plait.cli.options import duration_of, lease_of, size_of
from plait.cli.output import format_size
from plait.cli.serving.foreground import cannot_listen, check_free, is_about_port, print_ready, stop_on_signals
from plait.cli.serving.group_processes import GroupProcesses
from plait.cli.serving.interpreter_pauses import keep_pauses_short
from plait.cli.serving.open_files import fit_limits, raise_limit, segment_count
from plait.errors import DataDirError, InvalidArgument, StorageFailed
from plait.limits import ServerLimits
from plait.server.broker_server import Server
from plait.server.health_endpoint import HealthEndpoint
from plait.storage.logs.log import SEGMENT_SIZE_MIN
from plait.storage.logs.recovery import MISSING

log = logging.getLogger("plait.serve")

#: A recovery that takes longer logs its progress at this interval.
RECOVERY_SECONDS = 2.0
#: A failed disk may also hang: after this time the process ends without closing its files.
ABANDON_SECONDS = 5.0

Data = Annotated[Path, Parameter(help="The data directory; created if it does not exist.")]
Http = Annotated[int | None, Parameter(help="A port for GET /health over HTTP; 0 takes a free port. Default: no HTTP.")]
Flush = Annotated[
    Literal["async", "sync"],
    Parameter(help="sync: acknowledge when durable. async: when written; a power failure may lose the last 500 ms."),
]
SegmentSize = Annotated[str, Parameter(help="Bytes of one file of the message log.")]
Retention = Annotated[str, Parameter(help="How long messages are kept, unless the subject sets it; or 'forever'.")]
DeadRetention = Annotated[str, Parameter(help="How long dead letters are kept; 'forever': until they are purged.")]

ArchiveBeforeDelete = Annotated[
    bool,
    Parameter(
        help="Delete only what 'plait spark archive' has archived; sends are refused when the disk is full.",
        show_default=False,
    ),
]


def config_of(
    data: Path,
    *,
    group: str = "g1",
    flush: Literal["async", "sync"],
    segment_size: str,
    retention: str,
    dead_retention: str,
    archive_before_delete: bool,
    lease: str,
    auto_create: bool,
) -> BrokerConfig:
    """A broker's settings from its options. Raises the process's limit of open files."""
    return BrokerConfig(
        group=group,
        flush=flush,
        message_segment_size=_segment_size(segment_size),
        retention_seconds=None if retention == "forever" else duration_of(retention),
        dead_seconds=None if dead_retention == "forever" else duration_of(dead_retention),
        archive_before_delete=archive_before_delete,
        auto_create=auto_create,
        limits=fit_limits(ServerLimits(lease_seconds=lease_of(lease)), raise_limit(), segment_count(data)),
    )


def _segment_size(text: str) -> int:
    size = size_of(text)
    if size < SEGMENT_SIZE_MIN:
        raise InvalidArgument(
            f"--segment-size {text} is too small; use {SEGMENT_SIZE_MIN} bytes or more, so that any frame fits"
        )
    return size


async def run_broker(
    server: Server, data: Path, http: int | None, facts: str = "", groups: GroupProcesses | None = None
) -> int:
    """Serve until a signal, a storage failure or the end of one of the ``groups``; return the exit code.

    ``facts`` are printed in the ready line.
    """
    stop = stop_on_signals()
    config = server.config
    health = None if http is None else HealthEndpoint(server.broker_host, server.host, http)
    check_free(server.host, server.port)
    check_free(server.host, http or 0)
    report = await _start(server, data)
    _log_limits(config.limits)
    if health is not None:
        await health.start()
    assert server.failed is not None
    groups = groups or GroupProcesses(data, 1, ())
    try:
        await groups.start(server.address)
    except BaseException:
        await server.stop()
        raise
    shown = f"{facts}data={shlex.quote(str(data))} flush={config.flush} epoch={report.epoch}"
    keep_pauses_short()
    print_ready(server.address, shown, "" if health is None else f" http=http://{server.host}:{health.port}/health")
    stopping, ended = tasks.child(stop.wait(), "plait-stop"), tasks.child(groups.ended(), "plait-groups")
    await asyncio.wait((stopping, ended, server.failed), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    ended.cancel()
    if health is not None:
        await health.stop()
    await groups.stop()
    if not server.failed.done():
        log.info("draining")
        try:
            await server.stop()
        except OSError as error:
            raise StorageFailed(f"the last checkpoint could not be written ({error}); start again to recover") from None
        log.info("stopped")
    if server.failed.done():
        return await _abandon(server, server.failed.result())
    if ended.done() and not ended.cancelled() and not stop.is_set():
        raise ended.result()
    return 0


async def _abandon(server: Server, failure: StorageFailed) -> int:
    """End the process after a storage failure, even if the disk hangs. Nothing more is acknowledged."""
    sys.stderr.write(f"error: {failure.message} ({failure.code})\n")
    sys.stderr.flush()
    try:
        await asyncio.wait_for(server.stop(), ABANDON_SECONDS)
    except (TimeoutError, OSError):
        os._exit(failure.exit_code)
    return failure.exit_code


async def _start(server: Server, data: Path) -> RecoveryReport:
    begun = time.monotonic()
    starting = tasks.child(server.start(), "plait-start")
    try:
        while not (await asyncio.wait((starting,), timeout=RECOVERY_SECONDS))[0]:
            log.info("recovering %s: %.0f s, %d subjects so far", data, time.monotonic() - begun, _subjects(server))
        report = starting.result()
    except OSError as error:
        if is_about_port(error):
            raise cannot_listen(server.host, server.port, error) from None
        raise DataDirError(f"data directory {data} cannot be used: {error}") from error
    _log_report(report, data, time.monotonic() - begun)
    return report


def _subjects(server: Server) -> int:
    # The broker is created during the start.
    return len(server.broker.subjects) if hasattr(server, "broker") else 0


def _log_limits(limits: ServerLimits) -> None:
    """Warn if the limit of open files reduces the server's limits."""
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


def _log_report(report: RecoveryReport, data: Path, seconds: float) -> None:
    """Log what the start found."""
    how = "clean start" if report.clean else "recovered"
    log.info(
        "%s in %.2f s: epoch %d, %s of log read, %d frames, %d events",
        how,
        seconds,
        report.epoch,
        format_size(report.scanned_bytes),
        report.frames,
        report.events,
    )
    for rejected in report.rejected_checkpoints:
        log.warning("checkpoint %s; the previous one was used", rejected)
    if report.rebuilt_consume_logs:
        log.warning("%d consume logs were rebuilt from the message log", report.rebuilt_consume_logs)
    damaged = 0
    for damage in report.damages:
        where = f"{damage.log} log, offset {damage.offset}, {damage.size} bytes: {damage.reason}"
        if damage.kind == "torn":
            log.warning("torn tail removed, %s; the bytes are in quarantine/", where)
        elif damage.reason == MISSING:
            damaged += 1
            log.error("DAMAGE, %s; their messages are skipped", where)
        else:
            damaged += 1
            log.error("DAMAGE, %s; left in place and skipped, a copy is in quarantine/", where)
    if damaged:
        log.error("%d damaged regions: run 'plait doctor %s' to see what they held", damaged, data)
