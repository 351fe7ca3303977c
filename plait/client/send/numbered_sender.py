"""Stores frames whose producer sequences and partitions the caller has chosen and saved.

A client normally numbers its rows itself and forgets the numbers when its process ends. The caller of this sender keeps
them, so that another process can send the same frame under the same numbers to the same partition, and the broker
stores it once. A frame is never renumbered, cut or moved here. The caller sends the frames of a partition one after
another.

The predecessor of a frame in its partition need not be saved: when the broker does not accept the assumed one, it
replies with the last row of the producer that it has stored. It is accepted as the predecessor because every row
between the two was sent to another partition. The caller builds the same frame from the same rows, without compression,
which depends on the settings of a client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from plait.client.client import Client
from plait.client.net.router import SubjectRoute
from plait.client.send.partition_sender import pause_of
from plait.client.types import PartitionName
from plait.errors import OutOfSequence, PlaitError, RateLimited, Timeout, UnknownProducer
from plait.frame.builder import FrameParts
from plait.wire import messages as m
from plait.wire.link import Link

#: A partition, and whether its schedule is meant, which stores delayed rows.
SendTarget = tuple[PartitionName, bool]


class NumberedSender:
    """Sends frames with the client's connections. Other sends of the client are independent of it."""

    def __init__(self, client: Client) -> None:
        self._router = client._router
        self._limits = client.limits
        #: Target and producer → the last row that the broker is known to have stored.
        self._last: dict[tuple[SendTarget, int], int] = {}
        #: Target → the link over which its number was asked, and the number. Another link may lead to another epoch.
        self._numbers: dict[SendTarget, tuple[Link, int]] = {}

    def known(self, subject: str) -> SubjectRoute | None:
        """The newest known route of a subject."""
        return self._router.known(subject)

    async def route(self, subject: str) -> SubjectRoute:
        """Ask a meta server for the route of a subject, which is created if necessary."""
        return await self._router.refresh(subject)

    async def store(self, target: SendTarget, parts: FrameParts, check: Callable[[], None]) -> None:
        """Store one frame. ``check`` runs immediately before each attempt; its error ends the send.

        Other errors tell what is known about the frame:

        - ``StaleRoute``: the partition has not stored the frame and accepts none of its keys any more.
        - ``UnknownProducer`` or ``ProducerConflict``: it is unknown whether the rows are stored, and a resend under the
          same numbers does not show it.
        - Any other error: the frame may be stored; send it again.
        """
        known = target, parts.producer
        last = self._last.get(known, 0)
        while True:
            try:
                parts.follow(last)
                await self._send(target, parts, check)
            except OutOfSequence as error:
                stored = int(error.details.get("last", 0))
                if stored == last or stored >= parts.first:
                    raise
                last = stored
            except RateLimited as error:
                await asyncio.sleep(pause_of(error, self._limits))
            except UnknownProducer:
                if not last:
                    raise
                # The broker forgot an idle producer: a frame without a predecessor is stored, or recognised.
                last = 0
            else:
                break
        self._last[known] = parts.last

    async def _send(self, target: SendTarget, parts: FrameParts, check: Callable[[], None]) -> None:
        limit = self._limits.send_seconds
        try:
            async with asyncio.timeout(limit):
                link, number = await self._number(target)
                check()
                await link.request(m.SendRequest(number), parts.parts, parts.size)
        except TimeoutError:
            raise Timeout(f"no answer for a send to {target[0]} within {limit:g} s", seconds=limit) from None
        except PlaitError:
            self._numbers.pop(target, None)
            raise

    async def _number(self, target: SendTarget) -> tuple[Link, int]:
        """The link to the partition's broker, and the partition's number there."""
        name, delayed = target
        node = await self._router.group_node(name.group)
        link = await node.ready(self._limits.request_seconds)
        known = self._numbers.get(target)
        if known is None or known[0] is not link:
            found: m.PartitionNumberReply = await link.request(m.PartitionNumberRequest(name.name, delayed))
            known = self._numbers[target] = link, found.partition
        return known
