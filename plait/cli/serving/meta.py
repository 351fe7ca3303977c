"""``plait meta``: runs a meta server in the foreground.

Several meta servers may share a PostgreSQL database. A SQLite file can have only one.
"""

from __future__ import annotations

import fcntl
import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import sqlalchemy as sa
from cyclopts import Parameter

from plait.cli.event_loop import run_loop
from plait.cli.options import Lease, lease_of
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
from plait.errors import DataDirError
from plait.limits import MetaLimits
from plait.meta.database.connection import parse
from plait.server.meta.meta_server import MetaServer

log = logging.getLogger("plait.meta")


def meta(
    *,
    database: Annotated[
        str, Parameter(env_var="PLAIT_DATABASE", help="sqlite:///FILE, or postgresql://user:password@host/name.")
    ],
    port: Port = 7460,
    host: Host = DEFAULT_HOST,
    auto_create: Annotated[
        bool, Parameter(negative="--no-auto-create", help="Whether the first use of a subject creates it.")
    ] = True,
    lease: Lease = "10s",
    log_level: LogLevel = "info",
) -> int:
    """Run a meta server, until SIGTERM or Ctrl-C."""
    start_logging(log_level)
    check_port(port)
    url = parse(database)
    raise_limit()
    limits = MetaLimits.of_lease(lease_of(lease))
    server = MetaServer(database, host=host, port=port, meta_limits=limits, auto_create=auto_create)
    with _alone(url):
        return run_loop(_serve(server, url.render_as_string(hide_password=True)))


@contextmanager
def _alone(url: sa.URL) -> Iterator[None]:
    """Lock a SQLite file for one meta server: two would not see each other's members."""
    if url.get_backend_name() != "sqlite":
        yield
        return
    assert url.database is not None
    path = Path(url.database)
    try:
        # A separate file, as SQLite uses locks on the database itself.
        lock = path.with_name(path.name + ".lock").open("ab")
    except OSError as error:
        raise DataDirError(f"database {path} cannot be used: {error}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataDirError(
                f"database {path} is in use by another plait meta; stop it, or use PostgreSQL for several meta servers"
            ) from None
        yield


async def _serve(server: MetaServer, database: str) -> int:
    stop = stop_on_signals()
    check_free(server.host, server.port)
    try:
        await server.start()
    except OSError as error:
        if is_about_port(error):
            raise cannot_listen(server.host, server.port, error) from None
        raise
    cluster = await server.meta.call(lambda service: service.cluster)
    keep_pauses_short()
    print_ready(server.address, f"database={shlex.quote(database)} cluster={cluster}")
    await stop.wait()
    log.info("draining")
    await server.stop()
    log.info("stopped")
    return 0
