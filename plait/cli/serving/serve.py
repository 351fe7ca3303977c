"""``plait serve``: runs a node in the foreground: a broker and a meta server in one process; more with ``--groups``."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from plait.cli.event_loop import run_loop
from plait.cli.options import Lease
from plait.cli.serving.broker_process import (
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
from plait.cli.serving.foreground import DEFAULT_HOST, Host, LogLevel, Port, check_port, start_logging
from plait.cli.serving.group_processes import GroupProcesses, check_groups
from plait.memory import keep_buffers
from plait.server.broker_server import Server
from plait.server.cluster.cluster_role import database_in
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
    groups: Annotated[
        int, Parameter(help="Broker groups; each after the first is a separate process, to use more cores.")
    ] = 1,
    auto_create: Annotated[
        bool, Parameter(negative="--no-auto-create", help="Whether the first use of a subject creates it.")
    ] = True,
    log_level: LogLevel = "info",
) -> int:
    """Run a node on a data directory, until SIGTERM or Ctrl-C."""
    start_logging(log_level)
    check_port(port)
    check_groups(data, groups)
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
    options = ["--host", host, "--flush", flush, "--segment-size", segment_size, "--retention", retention]
    options += ["--dead-retention", dead_retention, "--lease", lease, "--log-level", log_level]
    options += ["--archive-before-delete"] if archive_before_delete else []
    facts = f"groups={groups} " if groups > 1 else ""
    return run_loop(run_broker(server, data, http, facts, GroupProcesses(data, groups, options)))
