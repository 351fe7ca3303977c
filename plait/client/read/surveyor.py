"""Asks brokers which sequences the partitions of a subject have. Scans of whole ranges are planned with the replies.

Requests to a disconnected broker are repeated for up to ``send_seconds``.
"""

from __future__ import annotations

import asyncio
import functools
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec

from plait import chance
from plait.client.net.node import Node
from plait.client.net.router import Router, SubjectRoute
from plait.client.types import PartitionName
from plait.errors import DataLost, PlaitError, StaleRoute, SubjectNotFound, Timeout, Unavailable
from plait.limits import ClientLimits
from plait.wire.admin.operation import Operation
from plait.wire.admin.partitions import CUT_SPANS, DESCRIBE_SPANS, SpanCuts, SpanRow
from plait.wire.admin.subjects import LIST_SUBJECTS

T = TypeVar("T")

#: Partitions in one request: their names fit an admin request at any length. Also the number of routes that are
#: requested at a time.
NAMES_MAX: Final = 200
#: Subjects that an error message lists.
SHOWN_MAX: Final = 20
#: Pause before a failed request is repeated.
AGAIN_SECONDS: Final = 0.05


class PartitionSpan(SpanRow, frozen=True):
    """The sequences of a partition, as a reader plans with them."""

    @property
    def place(self) -> PartitionName:
        return PartitionName(self.name, self.group)

    def range(self, start: int, end: int) -> SpanRange:
        return SpanRange(self.place, start, end, self.number)

    def epoch_at(self, sequence: int) -> int:
        """The data epoch that stored a sequence; 0 if unknown."""
        index = bisect_right(self.epochs, sequence, key=lambda entry: entry[0]) - 1
        return self.epochs[index][1] if index >= 0 else 0

    def first_after(self, epoch: int) -> int:
        """The first sequence of a later data epoch; ``end`` if there is none."""
        return next((first for first, number in self.epochs if number > epoch), self.end)


class SpanRange(msgspec.Struct, frozen=True):
    """Sequences [start, end) of a partition."""

    place: PartitionName
    start: int
    end: int
    #: The number of the span; distinguishes partitions that had the same name at different times.
    number: int = 0


class Surveyor:
    """Asks brokers, over its own connections. Use it with ``async with``."""

    def __init__(self, addresses: Sequence[str], limits: ClientLimits | None = None) -> None:
        self.limits = limits or ClientLimits()
        client = f"spans-{chance.process_number()}-{chance.token(6)}"
        self._meta = Node(list(addresses), client, self.limits)
        self._router = Router(self._meta, client, self.limits)
        #: The broker of each partition that ``find`` returned.
        self._places: dict[PartitionName, Node] = {}

    async def open(self) -> Self:
        """Connect; raises if no address answers in time."""
        try:
            await self._meta.open()
        except BaseException:
            await self._meta.close()
            raise
        return self

    async def close(self) -> None:
        await self._router.close()
        await self._meta.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def node(self, place: PartitionName) -> Node:
        """The broker of a partition that ``find`` returned; raises ``DataLost`` for any other."""
        node = self._places.get(place)
        if node is None:
            raise DataLost(
                f"{place} is not a partition of its subject: the subject was deleted, "
                "or created again with fewer partitions; plan the query again"
            )
        return node

    async def find(self, subjects: Iterable[str], prefixes: Iterable[str] = ()) -> list[PartitionName]:
        """The partitions of these subjects, and of subjects with these prefixes; raises ``SubjectNotFound``."""
        wanted = set(subjects)
        prefixes = list(prefixes)
        if prefixes:
            known = await self._with_retries(self._subjects)
            for prefix in prefixes:
                matching = [name for name in known if name.startswith(prefix)]
                if not matching:
                    raise _not_found(f"{prefix}*", known)
                wanted.update(matching)
        found = []
        for some in _pages(sorted(wanted)):
            for route in await asyncio.gather(*map(self._route, some)):
                for place in route.partitions:
                    self._places[place] = self._router.node(route, place.group)
                    found.append(place)
        return found

    async def _route(self, subject: str) -> SubjectRoute:
        return await self._with_retries(functools.partial(self._router.refresh, subject, create=False))

    async def _subjects(self) -> list[str]:
        found: set[str] = set()
        for node in await self._router.all_nodes():
            answer = LIST_SUBJECTS.result(await node.request(LIST_SUBJECTS.packet()))
            found.update(each.subject for each in answer)
        return sorted(found)

    async def spans(self, places: Sequence[PartitionName], times: Sequence[int] = ()) -> list[PartitionSpan]:
        """The current span of each partition; leaves out those that their broker does not have."""
        found: list[PartitionSpan] = []
        for members in _by_group(places).values():
            for some in _pages(members):
                names = [place.name for place in some]
                spans = await self._ask(some[0], DESCRIBE_SPANS, names=names, times=list(times))
                found += [PartitionSpan(*msgspec.structs.astuple(span)) for span in spans]
        return found

    async def cuts(self, ranges: Sequence[SpanRange], size: int) -> list[SpanCuts]:
        """Cut each range into pieces of at most about ``size`` bytes; 0: only measure the range."""
        return await self._cut(ranges, [size] * len(ranges), reach=False)

    async def reach(self, ranges: Sequence[SpanRange], sizes: Sequence[int]) -> list[SpanCuts]:
        """For each range, one cut: the sequence that ``size`` bytes from its start reach."""
        return await self._cut(ranges, sizes, reach=True)

    async def _cut(self, ranges: Sequence[SpanRange], sizes: Sequence[int], *, reach: bool) -> list[SpanCuts]:
        found: dict[int, SpanCuts] = {}
        indexes: dict[str, list[int]] = {}
        for index, each in enumerate(ranges):
            indexes.setdefault(each.place.group, []).append(index)
        for members in indexes.values():
            for some in _pages(members):
                asked = [(ranges[i].place.name, ranges[i].start, ranges[i].end, sizes[i]) for i in some]
                cuts = await self._ask(ranges[some[0]].place, CUT_SPANS, ranges=asked, reach=reach)
                found.update(zip(some, cuts, strict=True))
        return [found[index] for index in range(len(ranges))]

    async def _ask(self, place: PartitionName, operation: Operation[T], **arguments: Any) -> T:
        async def ask() -> T:
            return operation.result(await self.node(place).request(operation.packet(**arguments)))

        return await self._with_retries(ask)

    async def _with_retries(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Repeat a request while the server cannot be reached, for up to ``send_seconds``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.limits.send_seconds
        while True:
            try:
                return await ask()
            except (Unavailable, Timeout, StaleRoute) as error:
                if loop.time() >= deadline:
                    raise _named(error, self._meta.addresses) from error
                await asyncio.sleep(AGAIN_SECONDS)


def _by_group(places: Sequence[PartitionName]) -> dict[str, list[PartitionName]]:
    found: dict[str, list[PartitionName]] = {}
    for place in places:
        found.setdefault(place.group, []).append(place)
    return found


def _pages(members: Sequence[T]) -> Iterable[Sequence[T]]:
    for start in range(0, len(members), NAMES_MAX):
        yield members[start : start + NAMES_MAX]


def _not_found(subject: str, known: Sequence[str]) -> SubjectNotFound:
    more = "" if len(known) <= SHOWN_MAX else f" and {len(known) - SHOWN_MAX} more"
    there = f"there are {', '.join(known[:SHOWN_MAX])}{more}" if known else "there are no subjects"
    return SubjectNotFound(f"subject {subject!r} does not exist; {there}", subject=subject)


def _named(error: PlaitError, addresses: Sequence[str]) -> PlaitError:
    return type(error)(f"{', '.join(addresses)}: {error.message}")
