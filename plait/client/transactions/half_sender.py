"""Stores the half messages of one transaction at one broker group, and decides the transaction there.

The first message chooses the broker group: the one that its key leads to. Later messages are stored on the same group,
even if their keys lead to another one, because the group forwards them when they are committed. A subject without a
partition on the group is refused.

Messages are stored one after another. A frame whose fate is unknown is sent again to the same partition, and the broker
recognizes it. It is sent to another partition only after a definite refusal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from plait import chance
from plait.client.net.node import Node
from plait.client.net.router import Router, SubjectRoute
from plait.client.send.open_rows import hash_keys
from plait.client.send.partition_sender import pause_of
from plait.client.types import PartitionName
from plait.errors import (
    DiskFull,
    FlowControl,
    PlaitError,
    RateLimited,
    ReadOnly,
    StaleRoute,
    Timeout,
    TransactionNotFound,
    TransactionSpansGroups,
    Unavailable,
)
from plait.frame.builder import FrameParts, build_frame
from plait.frame.header import FLAG_UNSEQUENCED
from plait.limits import LOGICAL_PARTITIONS, ClientLimits
from plait.model.settings import priority_refused
from plait.wire import messages as m
from plait.wire.admin.operation import Operation
from plait.wire.admin.transactions import BEGIN_TRANSACTION, DECIDE_TRANSACTION
from plait.wire.link import Link

R = TypeVar("R")

#: Errors after which the same request may succeed.
PASSING: Final = (Unavailable, Timeout, FlowControl, DiskFull, ReadOnly)
#: The errors among these after which the request may have been executed.
_IN_DOUBT: Final = (Unavailable, Timeout)


class HalfRow(NamedTuple):
    """A message as it is stored; everything is encoded."""

    subject: str
    body: bytes
    key: str | None
    tags: bytes
    headers: bytes
    #: Microseconds since 1970; 0: at once.
    due: int
    #: The group that it is addressed to; empty: every group.
    to_group: bytes = b""
    priority: int = 0


class HalfSender:
    """The broker's side of one transaction, as its client sees it."""

    def __init__(self, router: Router, limits: ClientLimits, number: int, producer_group: str) -> None:
        self._router = router
        self._limits = limits
        self._number = number
        self._producer_group = producer_group
        #: The broker group, and its node; None until the first message.
        self.group: str | None = None
        self._node: Node | None = None
        self._begun = False
        #: The messages that are stored.
        self.count = 0
        #: Partition name → the number of the last message stored there.
        self._last: dict[str, int] = {}
        #: Partition name → the number of its half partition, which is valid on one link.
        self._partitions: dict[str, tuple[Link, int]] = {}
        #: True if a message may or may not be stored.
        self.in_doubt = False

    async def store(self, row: HalfRow, now: int, compression: str | None) -> tuple[PartitionName, int]:
        """Store a message; returns its partition and its number in the transaction."""
        hashes = None if row.key is None else hash_keys([row.key], 1)
        place: PartitionName | None = None
        doubt = False

        async def attempt() -> PartitionName:
            nonlocal place, doubt
            if place is None:
                route = await self._router.route(row.subject)
                if row.priority and route.order == "strict":
                    raise priority_refused(row.subject)
                place = self._place(route, None if hashes is None else int(hashes[0]) % LOGICAL_PARTITIONS)
                if self._node is None:
                    self.group, self._node = place.group, self._router.node(route, place.group)
            if not self._begun:
                await self._ask(BEGIN_TRANSACTION, producer_group=self._producer_group)
                self._begun = True
            parts = self._frame(row, hashes, place, now, compression)
            assert self._node is not None
            link = await self._node.ready(self._limits.request_seconds)
            number = await self._half_partition(link, place.name)
            try:
                await self._in_time(link.request(m.SendRequest(number), parts.parts, parts.size))
            except TransactionNotFound as error:
                if self.count:
                    raise
                # A broker forgets a transaction without messages after some seconds, and with a restart.
                self._begun = False
                raise Unavailable(error.message) from None
            except BaseException as error:
                # A caller that is cancelled does not learn whether the frame is stored, either.
                doubt |= not isinstance(error, PlaitError) or isinstance(error, _IN_DOUBT)
                raise
            return place

        async def refresh() -> None:
            nonlocal place, doubt
            self._partitions.pop(place.name if place is not None else "", None)
            place, doubt = None, False
            await self._router.refresh(row.subject)

        try:
            found = await self._repeat(attempt, refresh)
        except BaseException:
            self.in_doubt |= doubt
            raise
        self.count += 1
        self._last[found.name] = self.count
        return found, self.count

    def _frame(self, row: HalfRow, hashes: Any, place: PartitionName, now: int, compression: str | None) -> FrameParts:
        return build_frame(
            [row.body],
            producer=self._number,
            first=self.count + 1,
            previous=self._last.get(place.name, 0),
            send_time=now,
            deliver_at=row.due,
            keys=None if row.key is None else [row.key.encode()],
            key_hashes=hashes,
            groups=[row.to_group] if row.to_group else None,
            tags=[row.tags] if row.tags else None,
            headers=[row.headers] if row.headers else None,
            priority=row.priority or None,
            flags=FLAG_UNSEQUENCED,
            compression=compression,
            note=self._producer_group.encode(),
        )

    def _place(self, route: SubjectRoute, lp: int | None) -> PartitionName:
        """The partition that stores a message of this logical partition; None: the message has no key."""
        if lp is None:
            lp = min(int(chance.uniform(0, LOGICAL_PARTITIONS)), LOGICAL_PARTITIONS - 1)
        wanted = route.partitions[int(route.table[lp])]
        if self.group is None or wanted.group == self.group:
            return wanted
        here = [place for place in (route.partitions[index] for index in route.open()) if place.group == self.group]
        if not here:
            raise TransactionSpansGroups(
                f"subject {route.subject!r} has no partition on broker group {self.group!r}, which has the other "
                "messages of the transaction; create its subjects on the same broker groups, or send this message "
                "outside of the transaction",
                subject=route.subject,
                group=self.group,
            )
        return here[0]

    async def _half_partition(self, link: Link, name: str) -> int:
        known = self._partitions.get(name)
        if known is None or known[0] is not link:
            found: m.PartitionNumberReply = await self._in_time(
                link.request(m.PartitionNumberRequest(name, delayed=False, half=True))
            )
            known = self._partitions[name] = link, found.partition
        return known[1]

    async def decide(self, outcome: str) -> None:
        """Decide the transaction; repeated until the broker answers, because it decides once."""

        async def attempt() -> None:
            rows = self.count if outcome == "commit" else None
            try:
                await self._ask(DECIDE_TRANSACTION, outcome=outcome, rows=rows)
            except TransactionNotFound:
                # Without its only message, whose fate was unknown, there is nothing to roll back.
                if self.count:
                    raise

        if self.count or self.in_doubt:
            await self._repeat(attempt)

    async def _ask(self, operation: Operation[None], **arguments: Any) -> None:
        assert self._node is not None
        await self._node.request(operation.packet(transaction=self._number, **arguments))

    async def _in_time(self, request: Any) -> Any:
        limit = self._limits.request_seconds
        try:
            async with asyncio.timeout(limit):
                return await request
        except TimeoutError:
            raise Timeout(f"broker group {self.group} did not answer within {limit:g} s", seconds=limit) from None

    async def _repeat(self, attempt: Callable[[], Any], refresh: Callable[[], Any] | None = None) -> Any:
        """Repeat a request while it fails for a passing reason, for ``send_seconds`` at most."""
        loop, limits = asyncio.get_running_loop(), self._limits
        deadline = loop.time() + limits.send_seconds
        pause = limits.send_retry_first_seconds
        while True:
            try:
                return await attempt()
            except StaleRoute:
                if refresh is None or loop.time() > deadline:
                    raise
                await asyncio.sleep(pause)
                await self._refreshed(refresh)
            except RateLimited as error:
                # A send beyond the subject's rate waits, as other sends do.
                deadline = loop.time() + limits.send_seconds
                await asyncio.sleep(pause_of(error, limits))
                continue
            except PASSING:
                if loop.time() > deadline:
                    raise
                await asyncio.sleep(pause)
            pause = min(2 * pause, limits.send_retry_max_seconds)

    @staticmethod
    async def _refreshed(refresh: Callable[[], Any]) -> None:
        try:
            await refresh()
        except PlaitError as error:
            if not isinstance(error, PASSING) and not error.retryable:
                raise
