"""``plait broker``: runs a broker of a cluster in the foreground. The meta servers decide which partitions it has."""

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
from plait.errors import InvalidArgument
from plait.memory import keep_buffers
from plait.model import names
from plait.server.broker_server import Server
from plait.storage.disk import RealDisk
from plait.wire.link import parse_address


def broker(
    *,
    group: Annotated[str, Parameter(help="The broker group. Partition names include it: it must never change.")],
    meta: Annotated[str, Parameter(help="The meta servers: plait://host:port, separated by commas.")],
    data: Data,
    port: Port = 0,
    http: Http = None,
    host: Host = DEFAULT_HOST,
    flush: Flush = "async",
    segment_size: SegmentSize = "1GiB",
    retention: Retention = "72h",
    dead_retention: DeadRetention = "30d",
    archive_before_delete: ArchiveBeforeDelete = False,
    lease: Lease = "10s",
    log_level: LogLevel = "info",
) -> int:
    """Run a broker of a cluster on a data directory, until SIGTERM or Ctrl-C."""
    start_logging(log_level)
    check_port(port)
    names.check("broker group", group)
    metas = _addresses(meta)
    config = config_of(
        data,
        group=group,
        flush=flush,
        segment_size=segment_size,
        retention=retention,
        dead_retention=dead_retention,
        archive_before_delete=archive_before_delete,
        lease=lease,
        # Only meta servers create partitions: one that a client's old route names must not be created again.
        auto_create=False,
    )
    server = Server(RealDisk(data), config, host=host, port=port, metas=metas)
    keep_buffers()
    return run_loop(run_broker(server, data, http, f"group={group} "))


def _addresses(text: str) -> list[str]:
    addresses = [address.strip() for address in text.split(",")]
    for address in addresses:
        parse_address(address)
    if len(set(addresses)) != len(addresses):
        raise InvalidArgument(f"--meta {text} names an address twice; remove one")
    return addresses
