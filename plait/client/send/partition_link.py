"""The connection to one partition: the link to its broker, and its number there. Sends oneway rows directly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from plait import tasks
from plait.client.net.node import Node
from plait.client.send.open_rows import OpenRows, RowExtras
from plait.client.send.producer import Producer
from plait.client.send.resend_window import ResendWindow
from plait.client.types import MessageId, PartitionName, Receipt
from plait.errors import PlaitError
from plait.frame.header import FLAG_UNSEQUENCED
from plait.wire import messages as m
from plait.wire.link import Link


class PartitionLink:
    """The link and the number of one partition."""

    def __init__(
        self, producer: Producer, window: ResendWindow, looked: Callable[[PlaitError | None], None], *, delayed: bool
    ) -> None:
        self._producer = producer
        self._window = window
        #: Called with the outcome of ``look``.
        self._looked = looked
        self._delayed = delayed
        self._task: asyncio.Task[None] | None = None
        #: Oneway rows of this loop turn.
        self._oneway = OpenRows(producer, window, lambda *_: None)
        #: The partition and its node; None until the route is known.
        self.name: PartitionName | None = None
        self.node: Node | None = None
        self.link: Link | None = None
        #: The partition's number at its broker, valid in this data epoch; a later epoch may reuse the number.
        self.number: int | None = None
        self._epoch = 0
        #: The number of an earlier epoch.
        self._stale: int | None = None

    @property
    def group(self) -> str:
        """The broker group of the partition."""
        return self.name.group if self.name is not None else ""

    @property
    def connected(self) -> bool:
        """True if there is a link to the broker."""
        return self.link is not None and not self.link.closed

    @property
    def busy(self) -> bool:
        """True if oneway rows wait, or a request runs."""
        return bool(self._oneway.bodies) or self._task is not None

    def renew(self, link: Link) -> None:
        """Use a new link."""
        self.link = link
        if self.number is not None and (link.welcome is None or link.welcome.epoch != self._epoch):
            # A broker that lost the tail of its log may have given the number to another partition.
            self._stale, self.number = self.number, None

    def look(self) -> None:
        """Start a request for the partition's number, unless one runs."""
        if self._task is None:
            self._task = tasks.start(
                self._look(), f"plait-route-{self.name}", failed=lambda error: self._looked(tasks.error_of(error))
            )

    def cancel(self) -> None:
        """Stop the request."""
        if self._task is not None:
            self._task.cancel()

    async def _look(self) -> None:
        failure: PlaitError | None = None
        try:
            await self._find()
        except PlaitError as error:
            failure = error
        finally:
            self._task = None
        self._looked(failure)

    async def _find(self) -> None:
        """Ask the broker for the partition's number."""
        assert self.node is not None
        assert self.name is not None
        link = self.link
        found: m.PartitionNumberReply = await self.node.request(m.PartitionNumberRequest(self.name.name, self._delayed))
        self.number = found.partition
        self._epoch = link.welcome.epoch if link is not None and link.welcome is not None else 0
        if self._stale is not None and self._stale != self.number:
            self._window.replaced()
        self._stale = None

    async def send_oneway(
        self,
        body: Any,
        key: str | int | None,
        extras: RowExtras | None,
    ) -> Receipt:
        """Add a row that is sent once, at the end of this loop turn, and gets no reply."""
        while self.number is None:
            await self._find()
        rows, producer = self._oneway, self._producer
        if rows.bodies and rows.batch.first + len(rows.bodies) != producer.oneway_next:
            # The producer sequences of a frame must be consecutive, and rows of another partition got some in between.
            self.seal_oneway()
        rows.add(body, key, extras)
        number = producer.oneway_next
        producer.oneway_next += 1
        if len(rows.bodies) == 1:
            rows.batch.first = number
            producer.loop.call_soon(self.seal_oneway)
        if rows.size >= producer.limits.frame_bytes:
            self.seal_oneway()
            # No window limits oneway frames: wait until the socket accepts more, and let other tasks run.
            if self.link is not None:
                await self.link.drained()
            await asyncio.sleep(0)
        assert self.name is not None
        return Receipt(MessageId(producer.oneway_id, number), self.name, None)

    def seal_oneway(self) -> None:
        """Send the oneway rows, if there is a link."""
        rows = self._oneway
        if rows.bodies:
            if self.link is not None and self.number is not None:
                parts = rows.build(self._producer.oneway_id, rows.batch.first, 0, FLAG_UNSEQUENCED)
                self.link.notify(m.SendRequest(self.number, oneway=True), parts.parts, parts.size)
            rows.start()
