"""``plait serve``: a node in the foreground, with a broker and a meta server in one process."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from plait.cli.foreground import DEFAULT_HOST, Host, LogLevel, Port, begin_log, check_port
from plait.cli.loop import run_loop
from plait.cli.options import Lease
from plait.cli.running import (
    ArchiveBeforeDelete,
    Data,
    DeadRetention,
    Flush,
    Http,
    Retention,
    SegmentSize,
    config_of,
    run_broker,
)
from plait.memory import keep_buffers
from plait.server.host import Server
from plait.server.standing import database_in
from plait.storage.disk import RealDisk


def serve(
    *,
    data: Data,
    port: Port = 7450,
    http: Http = None,
    host: Host = DEFAULT_HOST,
    flush: Flush = "async",
    segment_size: SegmentSize = "1GiB",
    retention: Retention = "72h",
    dead_retention: DeadRetention = "30d",
    archive_before_delete: ArchiveBeforeDelete = False,
    lease: Lease = "10s",
    auto_create: Annotated[
        bool, Parameter(negative="--no-auto-create", help="Whether the first use of a subject creates it.")
    ] = True,
    log_level: LogLevel = "info",
) -> int:
    """Run a node on a data directory, until SIGTERM or Ctrl-C."""
    begin_log(log_level)
    check_port(port)
    config = config_of(
        data,
        flush=flush,
        segment_size=segment_size,
        retention=retention,
        dead_retention=dead_retention,
        archive_before_delete=archive_before_delete,
        lease=lease,
        auto_create=auto_create,
    )
    keep_buffers()
    server = Server(RealDisk(data), config, host=host, port=port, meta=database_in(data))
    return run_loop(run_broker(server, data, http))
