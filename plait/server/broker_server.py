"""``Server`` runs a broker that listens on a socket, with its cluster role."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from plait.broker import BrokerConfig
from plait.broker.recovery.start_up import RecoveryReport
from plait.clock import Clock, SystemClock
from plait.errors import StorageFailed
from plait.server.broker_host import BrokerHost
from plait.server.cluster.cluster_role import ClusterRole
from plait.server.cluster.forwarder import Forwarder
from plait.server.listener import Listener
from plait.server.requests import Handlers
from plait.storage.disk import Disk


class Server(Listener):
    """A broker that listens. ``start`` recovers and binds, ``stop`` drains, ``failed`` is set when storage fails."""

    def __init__(
        self,
        disk: Disk,
        config: BrokerConfig | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 7450,
        clock: Clock | None = None,
        meta: str | None = None,
        metas: Sequence[str] = (),
    ) -> None:
        """``meta``: database URL of a meta server in this process. ``metas``: addresses of other meta servers."""
        self.config = config or BrokerConfig()
        super().__init__(host, port, clock or SystemClock(), self.config.limits)
        self.broker_host = BrokerHost(self, disk, self.config)
        self.cluster = ClusterRole(self.broker_host, meta, metas)
        self.report: RecoveryReport | None = None
        self._stopping = False

    @property
    def failed(self) -> asyncio.Future[StorageFailed] | None:
        """Done when storage has failed; None before the start."""
        return self.broker_host.failed

    async def start(self) -> RecoveryReport:
        """Recover the data directory and serve; ``port`` is set afterwards."""
        host, alone = self.broker_host, self.cluster.alone
        try:
            self.report = await host.recover(routed=not alone)
            self.broker, self.membership = host.broker, host.membership
            Handlers(host, self.cluster).serve(self.connections)
            self.connections.on_lost = self.membership.disconnected
            await self.bind()
            await self.cluster.start()
            await self.listen()
        except BaseException:
            self.end_listening()
            await self.cluster.stop()
            host.release()
            raise
        host.run(*([] if alone else [Forwarder(host, self.cluster).run]))
        return self.report

    async def stop(self) -> None:
        """Stop serving: answer accepted requests, flush, and write a clean checkpoint."""
        if self._stopping:
            return
        self._stopping = True
        self.end_listening()
        await self.cluster.stop()
        # Disk work in progress must end before the last checkpoint.
        await self.broker_host.end_jobs()
        try:
            if self.broker.turn.failed is None:
                self.broker.stop()
        finally:
            self.broker_host.halt()
            await self.connections.hang_up()
            self.broker_host.release()

    async def abandon(self) -> None:
        """Stop like a crash: no further reply, write or checkpoint. The next start recovers."""
        if self._stopping:
            return
        self._stopping = True
        self.broker_host.halt()
        self.end_listening()
        await self.cluster.abandon()
        self.connections.abort_all()
        await self.broker_host.end_jobs()
        self.broker_host.release()
