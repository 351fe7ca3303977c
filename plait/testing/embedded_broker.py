"""A real broker inside a test: a ``Server`` with a data directory on a free loopback port.

``async with EmbeddedBroker() as broker`` runs the broker on the test's loop. ``with EmbeddedBroker() as broker`` runs
it in a separate thread and returns a ``BlockingBroker``, for blocking and asynchronous tests. A test can restart or
crash the broker and, with a ``ManualClock``, advance its time. Clients and apps of the same process (``plait.connect``,
``plait.sync.connect``, ``plait.App``) use the clock of the broker that they connect to.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import plait
import plait.sync
from plait.broker import BrokerConfig
from plait.client.arguments import Duration, seconds_of
from plait.client.blocking.loop_thread import LoopThread
from plait.clock import Clock, ManualClock, SystemClock, set_virtual
from plait.errors import Closed, InvalidArgument
from plait.limits import MIB, ServerLimits
from plait.meta.database.connection import DATABASE, Database
from plait.meta.database.migrate import migrate
from plait.server import Server
from plait.server.cluster.cluster_role import database_in
from plait.storage.disk import RealDisk

#: Small segments use little disk space, and the limits allow a nearly full disk. Sends do not fail on a busy machine,
#: or when the test advances the time during a sync.
TEST_CONFIG = BrokerConfig(
    message_segment_size=32 * MIB,
    action_segment_size=4 * MIB,
    disk_used_max=1.0,
    disk_free_min=64 * MIB,
    limits=ServerLimits(log_busy_seconds=float("inf"), queue_head_seconds=float("inf")),
)


@functools.cache
def empty_database() -> bytes:
    """An empty meta database. Creating one takes longer than the rest of a start, so it is cached."""
    with tempfile.TemporaryDirectory(prefix="plait-") as directory:
        database = Database(database_in(Path(directory)))
        migrate(database)
        database.close()
        return (Path(directory) / DATABASE).read_bytes()


def _prepare(data: Path) -> None:
    data.mkdir(parents=True, exist_ok=True)
    if not (data / DATABASE).exists():
        (data / DATABASE).write_bytes(empty_database())


class EmbeddedBroker:
    """A broker on the running loop. ``with`` instead of ``async with`` runs it in a thread (``BlockingBroker``).

    - ``data``: the data directory. The default is a temporary directory that is removed at the end.
    - ``clock``: ``ManualClock()`` makes the broker use virtual time.
    - ``metas``: the addresses of the cluster's meta servers. By default the broker runs a meta server in its own
      process; with an empty list there is no meta server.

    The broker keeps its port after a ``restart``, so that clients can connect to it again.
    """

    def __init__(
        self,
        data: str | Path | None = None,
        *,
        config: BrokerConfig | None = None,
        clock: Clock | None = None,
        metas: Sequence[str] | None = None,
    ) -> None:
        self._data = None if data is None else Path(data)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self.config = config or TEST_CONFIG
        self.clock = clock or SystemClock()
        self._metas = metas
        self._server: Server | None = None
        self._port = 0
        self._thread: LoopThread | None = None

    @property
    def address(self) -> str:
        """What clients connect to."""
        if not self._port:
            raise Closed("the broker has not been started; use 'async with' or 'with'")
        return f"plait://127.0.0.1:{self._port}"

    @property
    def data(self) -> Path:
        if self._data is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="plait-")
            self._data = Path(self._temporary.name)
        return self._data

    @property
    def server(self) -> Server:
        """The running server, for tests that look inside."""
        if self._server is None:
            raise Closed("the broker is down; start() it first")
        return self._server

    def connect(self, *, client_id: str | None = None, limits: plait.ClientLimits | None = None) -> plait.Client:
        """A client of this broker, for ``async with``. It uses the broker's clock."""
        return plait.connect(self.address, client_id=client_id, limits=limits)

    async def start(self) -> None:
        """Recover the data directory and serve. Does nothing if it already runs."""
        if self._server is None:
            meta = None
            if self._metas is None:
                _prepare(self.data)
                meta = database_in(self.data)
            server = Server(
                RealDisk(self.data), self.config, port=self._port, clock=self.clock, meta=meta, metas=self._metas or ()
            )
            await server.start()
            self._server = server
            self._port = server.port
            if isinstance(self.clock, ManualClock):
                set_virtual(self.address, self.clock)

    async def stop(self) -> None:
        """Stop in order: everything is flushed and the next start is clean."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop()

    async def kill(self) -> None:
        """Crash: connections break, nothing is flushed, no checkpoint is written. ``start`` or ``restart`` recovers."""
        server, self._server = self._server, None
        if server is not None:
            await server.abandon()

    async def restart(self) -> None:
        """Stop in order, if it runs, and start again with the same address."""
        await self.stop()
        await self.start()

    async def advance(self, seconds: Duration, *, silent: Collection[str] = ()) -> None:
        """Let virtual time pass, and run what is due by then.

        A client with an open connection counts as alive, as if it had sent heartbeats; clients in ``silent`` (client
        ids) sent none.
        """
        if not isinstance(self.clock, ManualClock):
            raise InvalidArgument("this broker runs on the machine's clock; give it clock=ManualClock()")
        self.clock.advance(seconds_of(seconds))
        server, host = self.server, self.server.broker_host
        now = self.clock.monotonic()
        for connection in server.connections:
            if connection.client not in silent:
                connection.last_received = now
                for consumer in connection.consumers.values():
                    consumer.last_contact = now
        host.tick()
        host.upkeep.housekeep()
        server.broker.run_timers()
        host.arm_timer()
        server.cluster.wake()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.stop()
        finally:
            self._clean()

    def _clean(self) -> None:
        if self._port:
            set_virtual(self.address, None)
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> BlockingBroker:
        self._thread = LoopThread("plait-broker")
        try:
            self._thread.run(self.start())
        except BaseException:
            self._thread.stop()
            raise
        return BlockingBroker(self, self._thread)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._thread is not None
        try:
            self._thread.run(self.stop())
        finally:
            self._thread.stop()
            self._clean()


class BlockingBroker:
    """An ``EmbeddedBroker`` that runs in a separate thread; created by ``with EmbeddedBroker()``."""

    def __init__(self, broker: EmbeddedBroker, thread: LoopThread) -> None:
        self._broker = broker
        self._thread = thread

    @property
    def address(self) -> str:
        """What clients connect to."""
        return self._broker.address

    @property
    def data(self) -> Path:
        return self._broker.data

    def connect(self, *, client_id: str | None = None, limits: plait.ClientLimits | None = None) -> plait.sync.Client:
        """A blocking client of this broker, for ``with``. It uses the broker's clock."""
        return plait.sync.connect(self.address, client_id=client_id, limits=limits)

    def start(self) -> None:
        """Recover the data directory and serve. Does nothing if it already runs."""
        self._thread.run(self._broker.start())

    def stop(self) -> None:
        """Stop in order: everything is flushed and the next start is clean."""
        self._thread.run(self._broker.stop())

    def kill(self) -> None:
        """Crash: connections break, nothing is flushed, no checkpoint is written. ``start`` or ``restart`` recovers."""
        self._thread.run(self._broker.kill())

    def restart(self) -> None:
        """Stop in order, if it runs, and start again with the same address."""
        self._thread.run(self._broker.restart())

    def advance(self, seconds: Duration, *, silent: Collection[str] = ()) -> None:
        """Let virtual time pass, as ``EmbeddedBroker.advance``."""
        self._thread.run(self._broker.advance(seconds, silent=silent))
