"""Queries: finds stored messages by key, message id, headers and time, in all partitions of a subject.

A partition is examined by one request after another, each of a bounded part. The query ends when everything was
examined, when it has enough messages, or when it has examined as much as it may; a token continues it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, overload

import msgspec
from crc32c import crc32c

from plait.client.arguments import Duration, limit_of, moment_of, seconds_of, shown
from plait.client.consume.delivered import DeliveredFrame
from plait.client.net.node import Node
from plait.client.net.router import Router
from plait.client.send.encoding import encode_key
from plait.client.types import Message, MessageId, PartitionName
from plait.errors import DataLost, InvalidArgument, StaleRoute, Timeout, Unavailable
from plait.frame.header import SEQUENCE_MAX
from plait.frame.view import frames_in
from plait.limits import ClientLimits
from plait.model.filter_terms import FilterTerms, filter_terms
from plait.wire.query_messages import QueryReply, QueryRequest

_ID: Final = re.compile(r"([0-9a-f]{16})-(0|[1-9][0-9]{0,18})")
#: Pause before a request is repeated that the broker could not serve.
_AGAIN_SECONDS: Final = 0.05


def message_id_of(value: Any) -> MessageId:
    """A message id from its text, or from a receipt, a message or an id."""
    value = getattr(value, "message_id", value)
    if isinstance(value, MessageId):
        return value
    match = _ID.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[2]) >= SEQUENCE_MAX:
        raise InvalidArgument(
            f"message id {shown(value)} is not understood; use a receipt, or text such as 00c0ffee00000001-17"
        )
    return MessageId(int(match[1], 16), int(match[2]))


class QueryTarget(msgspec.Struct, frozen=True):
    """What a query looks for, checked."""

    subject: str
    key: str | None
    message_id: tuple[int, int] | None
    filter: FilterTerms | None
    since: int | None
    until: int | None


class QueryPlace(msgspec.Struct, array_like=True):
    """How far a query has examined one partition. ``number`` tells lives of the partition apart; -1: not known yet."""

    name: str
    group: str
    number: int = -1
    next: int = 0
    end: int = 0

    @property
    def done(self) -> bool:
        return self.number >= 0 and self.next >= self.end

    @property
    def partition(self) -> PartitionName:
        return PartitionName(self.name, self.group)


class QueryToken(msgspec.Struct, array_like=True, frozen=True):
    """Where a query continues."""

    target: QueryTarget
    places: list[QueryPlace]

    def encode(self) -> str:
        data = msgspec.msgpack.encode(self)
        return base64.urlsafe_b64encode(crc32c(data).to_bytes(4, "little") + data).decode()

    @classmethod
    def decode(cls, text: Any) -> QueryToken:
        """The token in a text; raises ``InvalidArgument``."""
        try:
            data = base64.urlsafe_b64decode(text)
            if crc32c(data[4:]) != int.from_bytes(data[:4], "little"):
                raise ValueError
            return msgspec.msgpack.decode(data[4:], type=cls)
        except (ValueError, TypeError, binascii.Error, msgspec.MsgspecError):
            raise InvalidArgument(f"token {shown(text)} is not one that a query returned; copy it unchanged") from None


class QueryResult(Sequence[Message]):
    """The messages that a query found, those of a partition in order, and what it did not examine."""

    def __init__(
        self, messages: list[Message], places: list[QueryPlace], target: QueryTarget, reason: str | None
    ) -> None:
        self.messages = messages
        rest = [place for place in places if not place.done]
        #: Why the query ended before everything was examined; None: everything was, or ``limit`` was reached.
        self.reason = reason if rest else None
        #: Continues the query: ``client.query(subject, token=...)``. None: everything was examined.
        self.token = QueryToken(target, rest).encode() if rest else None
        #: The sequence up to which each unfinished partition was examined.
        self.reached = {place.partition: place.next for place in rest}
        #: Messages and bytes of frames that the brokers examined.
        self.examined_count = 0
        self.examined_bytes = 0

    @property
    def partial(self) -> bool:
        """True if the query ended because it had examined as much as it may. ``reason`` says what ended it."""
        return self.reason is not None

    def __len__(self) -> int:
        return len(self.messages)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        return self.messages[index]

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    def __repr__(self) -> str:
        return f"<{len(self.messages)} messages{f', partial: {self.reason}' if self.reason else ''}>"


class QueryRun:
    """One call of ``query``."""

    def __init__(
        self, router: Router, limits: ClientLimits, target: QueryTarget, limit: int, caps: tuple[int, int, float]
    ) -> None:
        self._router = router
        self._limits = limits
        self._target = target
        self._limit = limit
        self._count_max, self._bytes_max, seconds = caps
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._seconds = seconds
        self._count = self._bytes = 0
        self._reason: str | None = None
        #: True once the only message with the id was found.
        self._over = False

    async def run(self, places: list[QueryPlace] | None) -> QueryResult:
        """Examine all partitions, or continue at these places."""
        route = await self._router.refresh(self._target.subject, create=False)
        if places is None:
            places = [QueryPlace(*name) for name in route.partitions]
        known = set(route.partitions)
        # A partition that left the route was empty.
        places = [place for place in places if place.partition in known]
        nodes = [self._router.node(route, place.group) for place in places]
        found = await asyncio.gather(*map(self._examine, places, nodes))
        messages = self._merged(places, found)
        result = QueryResult(messages, [] if self._over else places, self._target, self._reason)
        result.examined_count, result.examined_bytes = self._count, self._bytes
        return result

    def _merged(self, places: list[QueryPlace], found: list[list[Message]]) -> list[Message]:
        """The first messages by store time, those of a partition in order. The others are found again later."""
        chosen: list[Message] = []
        at = [0] * len(places)
        times = [[message.store_time for message in messages] for messages in found]
        while len(chosen) < self._limit:
            heads = [(times[i][at[i]], i) for i in range(len(places)) if at[i] < len(found[i])]
            if not heads:
                break
            _, index = min(heads)
            chosen.append(found[index][at[index]])
            at[index] += 1
        for place, messages, taken in zip(places, found, at, strict=True):
            if taken < len(messages):
                place.next = messages[taken].sequence
        return chosen

    async def _examine(self, place: QueryPlace, node: Node) -> list[Message]:
        found: list[Message] = []
        while not place.done and len(found) < self._limit and not self._over and not self._capped():
            before = place.next
            try:
                reply, payload = await self._ask(place, node, self._limit - len(found))
            except StaleRoute:
                route = await self._router.refresh(self._target.subject, create=False)
                if place.partition in route.partitions:
                    raise
                place.number = place.next = place.end = 0
                break
            if place.number not in (-1, reply.partition):
                raise DataLost(
                    f"{place.partition} was deleted and created again while it was queried; start the query again"
                )
            self._count += reply.examined
            self._bytes += reply.examined_bytes
            for frame in frames_in(payload):
                frame.verify()
                delivered = DeliveredFrame(
                    frame, self._target.subject, place.partition, None, [(frame.base, frame.end, 1)]
                )
                found += delivered.messages(0, frame.count)
            place.number, place.next, place.end = reply.partition, reply.next, reply.end
            if found and self._target.message_id is not None:
                self._over = True
            elif place.next == before and not place.done and not payload:
                # The broker is busy sending earlier replies.
                await asyncio.sleep(_AGAIN_SECONDS)
        return found

    def _capped(self) -> bool:
        if self._count >= self._count_max:
            self._reason = f"{self._count} messages were examined (scan_count={self._count_max})"
        elif self._bytes >= self._bytes_max:
            self._reason = f"{self._bytes} bytes were examined (scan_bytes={self._bytes_max})"
        elif asyncio.get_running_loop().time() >= self._deadline:
            self._reason = f"{self._seconds:g} seconds were over (scan_seconds={self._seconds:g})"
        return self._reason is not None

    async def _ask(self, place: QueryPlace, node: Node, count: int) -> tuple[QueryReply, memoryview]:
        target = self._target
        span = None if place.number < 0 else (place.next, place.end)
        request = QueryRequest(
            place.name,
            target.key,
            target.message_id,
            target.filter,
            target.since,
            target.until,
            span,
            count,
            self._limits.pull_bytes,
        )
        while True:
            link = await node.ready(self._limits.send_seconds)
            try:
                async with asyncio.timeout(self._limits.request_seconds):
                    return await link.request_payload(request)
            except Unavailable:
                continue
            except TimeoutError:
                raise Timeout(f"no answer to a query of {place.partition}; query again") from None


def target_of(
    subject: str, key: Any, message_id: Any, where: Any, tags: Any, since: Any, until: Any, now: int
) -> QueryTarget:
    """Check what a query looks for."""
    target = QueryTarget(
        subject,
        None if key is None else encode_key(key),
        None if message_id is None else message_id_of(message_id),
        filter_terms(where, tags),
        moment_of(since, "since", now),
        moment_of(until, "until", now),
    )
    if target.since is not None and target.until is not None and target.since >= target.until:
        raise InvalidArgument(f"since {shown(since)} is not before until {shown(until)}; no message can match")
    return target


def continued(subject: str, token: str, given: QueryTarget) -> tuple[QueryTarget, list[QueryPlace]]:
    """What the query of a token looks for, and where it continues."""
    decoded = QueryToken.decode(token)
    if decoded.target.subject != subject:
        raise InvalidArgument(f"the token belongs to a query of {decoded.target.subject!r}, not of {subject!r}")
    if given != QueryTarget(subject, None, None, None, None, None):
        raise InvalidArgument("a token has the arguments of its query; give only the subject, the token and limits")
    return decoded.target, decoded.places


def caps_of(count: Any, size: Any, seconds: Duration) -> tuple[int, int, float]:
    """What a query examines at most."""
    return limit_of(count, "scan_count"), limit_of(size, "scan_bytes"), seconds_of(seconds)
