"""``plait serve`` and ``plait broker``: a broker in the foreground, with a meta server in its process or without one.

SIGTERM and SIGINT drain it and end the process with code 0. Failed storage ends the process with code 9: a broker must
not acknowledge what it could not write.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from plait import tasks
from plait.broker.config import BrokerConfig
from plait.broker.recovery.start_up import RecoveryReport
from plait.broker.turn import MESSAGE_DIRECTORY
from plait.cli.event_loop import run_loop
from plait.cli.options import Lease, described, duration_of, flag, lease_of, size_of
from plait.cli.output import format_size
from plait.cli.serving.child_process import GroupProcesses, check_groups
from plait.cli.serving.foreground import (
    DEFAULT_HOST,
    Host,
    LogLevel,
    Port,
    cannot_listen,
    check_free,
    check_port,
    is_about_port,
    keep_pauses_short,
    print_ready,
    raise_limit,
    start_logging,
    stop_on_signals,
)
from plait.errors import DataDirError, InvalidArgument, StorageFailed
from plait.limits import FILES_PER_SEGMENT, FILES_RESERVE, ServerLimits
from plait.memory import keep_buffers
from plait.model import names
from plait.server.broker_server import Server
from plait.server.cluster.cluster_role import database_in
from plait.server.health_endpoint import HealthEndpoint
from plait.storage.disk import RealDisk
from plait.storage.logs.action_log import DIRECTORY as ACTION_DIRECTORY
from plait.storage.logs.log import SEGMENT_SIZE_MIN
from plait.storage.logs.recovery import MISSING
from plait.storage.logs.retained_log import DIRECTORY as RETAINED_DIRECTORY
from plait.storage.logs.segment import SUFFIX
from plait.wire.link import parse_address

log = logging.getLogger("plait.serve")

#: A recovery that takes longer logs its progress at this interval.
RECOVERY_SECONDS = 2.0
#: A failed disk may also hang: after this time the process ends without closing its files.
ABANDON_SECONDS = 5.0


@Parameter(name="*")
@dataclass(kw_only=True)
class BrokerOptions:
    """The options of ``plait serve`` and ``plait broker``."""

    data: Annotated[Path, described("The data directory; created if it does not exist.")]
    http: Annotated[
        int | None, described("A port for GET /health over HTTP; 0 takes a free port. Default: no HTTP.")
    ] = None
    host: Host = DEFAULT_HOST
    flush: Annotated[
        Literal["async", "sync"],
        described("sync: acknowledge when durable. async: when written; a power failure may lose the last 500 ms."),
    ] = "async"
    segment_size: Annotated[str, described("Bytes of one file of the message log.")] = "1GiB"
    retention: Annotated[str, described("How long messages are kept, unless the subject sets it; or 'forever'.")] = (
        "72h"
    )
    dead_retention: Annotated[str, described("How long dead letters are kept; 'forever': until they are purged.")] = (
        "30d"
    )
    archive_before_delete: Annotated[
        bool,
        flag("Delete only what 'plait spark archive' has archived; sends are refused when the disk is full."),
    ] = False
    lease: Lease = "10s"
    log_level: LogLevel = "info"

    def config(self, *, group: str = "g1", auto_create: bool) -> BrokerConfig:
        """A broker's settings. Raises the process's limit of open files."""
        size = size_of(self.segment_size)
        if size < SEGMENT_SIZE_MIN:
            raise InvalidArgument(
                f"--segment-size {self.segment_size} is too small; use {SEGMENT_SIZE_MIN} bytes or more, so that any "
                "frame fits"
            )
        return BrokerConfig(
            group=group,
            flush=self.flush,
            message_segment_size=size,
            retention_seconds=None if self.retention == "forever" else duration_of(self.retention),
            dead_seconds=None if self.dead_retention == "forever" else duration_of(self.dead_retention),
            archive_before_delete=self.archive_before_delete,
            auto_create=auto_create,
            limits=fit_limits(
                ServerLimits(lease_seconds=lease_of(self.lease)), raise_limit(), segment_count(self.data)
            ),
        )

    def arguments(self) -> list[str]:
        """The options for the broker of another group of the same node."""
        names = ("host", "flush", "segment_size", "retention", "dead_retention", "lease", "log_level")
        found = [part for name in names for part in (f"--{name.replace('_', '-')}", getattr(self, name))]
        return [*found, "--archive-before-delete"] if self.archive_before_delete else found


def serve(
    options: BrokerOptions,
    *,
    port: Port = 7450,
    groups: Annotated[
        int, described("Broker groups; each after the first is a separate process, to use more cores.")
    ] = 1,
    auto_create: Annotated[
        bool, Parameter(negative="--no-auto-create", help="Whether the first use of a subject creates it.")
    ] = True,
) -> int:
    """Run a node on a data directory, until SIGTERM or Ctrl-C."""
    start_logging(options.log_level)
    check_port(port)
    data = options.data
    check_groups(data, groups)
    config = options.config(auto_create=auto_create)
    keep_buffers()
    server = Server(RealDisk(data), config, host=options.host, port=port, meta=database_in(data))
    facts = f"groups={groups} " if groups > 1 else ""
    return run_loop(run_broker(server, options, facts, GroupProcesses(data, groups, options.arguments())))


def broker(
    options: BrokerOptions,
    *,
    group: Annotated[str, described("The broker group. Partition names include it: it must never change.")],
    meta: Annotated[str, described("The meta servers: plait://host:port, separated by commas.")],
    port: Port = 0,
) -> int:
    """Run a broker of a cluster on a data directory, until SIGTERM or Ctrl-C."""
    start_logging(options.log_level)
    check_port(port)
    names.check("broker group", group)
    metas = [address.strip() for address in meta.split(",")]
    for address in metas:
        parse_address(address)
    if len(set(metas)) != len(metas):
        raise InvalidArgument(f"--meta {meta} names an address twice; remove one")
    # Only meta servers create partitions: one that a client's old route names must not be created again.
    config = options.config(group=group, auto_create=False)
    server = Server(RealDisk(options.data), config, host=options.host, port=port, metas=metas)
    keep_buffers()
    return run_loop(run_broker(server, options, f"group={group} ", GroupProcesses(options.data, 1, ())))


def segment_count(data: Path) -> int:
    """The number of log segments in a data directory. A server keeps all of them open."""
    directories = (MESSAGE_DIRECTORY, RETAINED_DIRECTORY, ACTION_DIRECTORY)
    return sum(1 for directory in directories for _ in (data / directory).glob(f"*{SUFFIX}"))


def fit_limits(limits: ServerLimits, files: int, segments: int) -> ServerLimits:
    """The limits, with as many connections and open maps as fit into ``files``; at least one of each.

    Connections, mapped consume logs and log segments share the limit of open files. If connections could exhaust it,
    the next segment could not be opened.
    """
    if files == resource.RLIM_INFINITY:
        return limits
    room = files - FILES_RESERVE - segments * FILES_PER_SEGMENT
    # Closed maps are opened again on demand; without any, every read of old messages would open a file.
    maps = min(limits.open_maps, max(room // 4, 1))
    return msgspec.structs.replace(limits, open_maps=maps, connections=min(limits.connections, max(room - maps, 1)))


async def run_broker(server: Server, options: BrokerOptions, facts: str, groups: GroupProcesses) -> int:
    """Serve until a signal, a storage failure or the end of one of the ``groups``; return the exit code.

    ``facts`` are printed in the ready line.
    """
    stop = stop_on_signals()
    config, data, http = server.config, options.data, options.http
    health = None if http is None else HealthEndpoint(server.broker_host, server.host, http)
    check_free(server.host, server.port)
    check_free(server.host, http or 0)
    report = await _start(server, data)
    _log_limits(config.limits)
    if health is not None:
        await health.start()
    assert server.failed is not None
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
            # The broker is created during the start.
            subjects = len(server.broker.subjects) if hasattr(server, "broker") else 0
            log.info("recovering %s: %.0f s, %d subjects so far", data, time.monotonic() - begun, subjects)
        report = starting.result()
    except OSError as error:
        if is_about_port(error):
            raise cannot_listen(server.host, server.port, error) from None
        raise DataDirError(f"data directory {data} cannot be used: {error}") from error
    _log_report(report, data, time.monotonic() - begun)
    return report


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
