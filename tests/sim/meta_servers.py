"""Meta servers of a simulation over one SQLite file, which can be made unavailable."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from plait.errors import MetaUnavailable
from plait.limits import MetaLimits, ServerLimits
from plait.meta.database.connection import Database, file_url
from plait.server.meta.meta_server import MetaServer
from plait.testing.embedded_broker import empty_database
from plait.testing.sim import Process, Simulation

METAS = {"meta-1": 7461, "meta-2": 7462}
ADDRESSES = [f"plait://127.0.0.1:{port}" for port in METAS.values()]
#: Short, so that a run of half a minute has many leases.
LEASE_SECONDS = 3.0
LIMITS = ServerLimits(lease_seconds=LEASE_SECONDS, lease_margin=0.1, consumer_lost_seconds=3.0)
META_LIMITS = MetaLimits(
    member_lost_seconds=LEASE_SECONDS, broker_lost_seconds=3.0, heartbeat_flush_seconds=1.0, gap_seconds=1.0
)


class Outage(NamedTuple):
    """The meta servers' database is unavailable."""

    at: float
    seconds: float


class MetaServers:
    """The meta servers of one run, and their database."""

    def __init__(self, simulation: Simulation, *, auto_create: bool = True) -> None:
        self._simulation = simulation
        self._auto_create = auto_create
        self.processes = [simulation.process(name, self._serve) for name in METAS]
        self._servers: list[MetaServer] = []
        shared = "/dev/shm"
        self._directory = Path(tempfile.mkdtemp(prefix="plait-", dir=shared if os.path.isdir(shared) else None))
        (self._directory / "meta.db").write_bytes(empty_database())
        self._away = False

    def play(self, outages: Sequence[Outage]) -> None:
        for outage in outages:
            self._simulation.call_later(outage.at, self._set_away, True)
            self._simulation.call_later(outage.at + outage.seconds, self._set_away, False)

    def heal(self) -> None:
        self._away = False

    def close(self) -> None:
        for server in self._servers:
            if server.meta._store is not None:
                server.meta._store.close()
        shutil.rmtree(self._directory)

    async def _serve(self, process: Process) -> None:
        server = MetaServer(
            file_url(str(self._directory / "meta.db")),
            port=METAS[process.name],
            clock=process.clock,
            meta_limits=META_LIMITS,
            auto_create=self._auto_create,
            alone=False,
        )
        self._servers.append(server)
        await server.start()
        assert server.meta._store is not None
        self._let_fail(server.meta._store.database)

    def _set_away(self, away: bool) -> None:
        self._simulation.log("database", "is away" if away else "answers again")
        self._away = away

    def _let_fail(self, database: Database) -> None:
        """Make every call of the database raise during an outage."""
        translated, quick = database._translated, database.quick

        @contextmanager
        def fails_now_and_then() -> Iterator[None]:
            if self._away:
                raise MetaUnavailable("the database is away")
            with translated():
                yield

        database._translated = fails_now_and_then
        database.quick = lambda statement: None if self._away else quick(statement)
