"""Which sequences a subject's partitions have, asked of their brokers: what reading whole ranges is planned by.

A broker that is away for a moment is asked again until it is back, for ``send_seconds`` at most.
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
from plait.wire import messages as m

T = TypeVar("T")

#: Partitions that one request names, whose names fit a management request whatever they are; and routes that are asked
#: for at a time.
NAMES_MAX: Final = 200
#: Names of subjects that an error message lists.
SHOWN_MAX: Final = 20
#: Pause before a broker that was lost is asked again.
AGAIN_SECONDS: Final = 0.05


class PartitionSpan(msgspec.Struct, frozen=True):
    """A partition, the sequences [start, end) that it has, and which epoch stored what of them.

    ``number`` is another one when a subject of that name was deleted and made anew. For each time that was asked for,
    ``at`` is the first sequence stored then or later, and ``until`` the one after the last that was stored before.
    """

    name: str
    subject: str
    number: int
    start: int
    end: int
    #: (first sequence, epoch), ascending.
    epochs: list[tuple[int, int]]
    at: list[int] = []
    until: list[int] = []
    group: str = ""
    #: The partition takes no more messages: ``end`` is behind its last one.
    sealed: bool = False

    @property
    def place(self) -> PartitionName:
        """Prints as ``name@group``."""
        return PartitionName(self.name, self.group)

    def range(self, start: int, end: int) -> SpanRange:
        """Some of its sequences."""
        return SpanRange(self.place, start, end, self.number)

    def epoch_at(self, sequence: int) -> int:
        """The epoch that stored a sequence; 0: not known."""
        index = bisect_right(self.epochs, sequence, key=lambda entry: entry[0]) - 1
        return self.epochs[index][1] if index >= 0 else 0

    def first_after(self, epoch: int) -> int:
        """The first sequence that a later epoch stored; the end where there is none."""
        return next((first for first, number in self.epochs if number > epoch), self.end)


class SpanCuts(msgspec.Struct, frozen=True):
    """The size of a range, and where its pieces end."""

    size: int
    ends: list[int]


class SpanRange(msgspec.Struct, frozen=True):
    """Sequences [start, end) of a partition."""

    place: PartitionName
    start: int
    end: int
    #: That of the span, where partitions of one name are told apart.
    number: int = 0


class Surveyor:
    """Asks brokers, over links of its own, for ``async with``."""

    def __init__(self, addresses: Sequence[str], limits: ClientLimits | None = None) -> None:
        self.limits = limits or ClientLimits()
        client = f"spans-{chance.process_number()}-{chance.token(6)}"
        self._meta = Node(list(addresses), client, self.limits)
        self._router = Router(self._meta, client, self.limits)
        #: Who has each partition that was found.
        self._places: dict[PartitionName, Node] = {}

    async def open(self) -> Self:
        """Connect; raises when no address answers in time."""
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
        """The broker of a partition that ``find`` has found; ``DataLost`` where it has not."""
        node = self._places.get(place)
        if node is None:
            raise DataLost(
                f"{place} is not one of the partitions of its subject (any more): "
                "it was deleted, or made anew with fewer of them"
            )
        return node

    async def find(self, subjects: Iterable[str], prefixes: Iterable[str] = ()) -> list[PartitionName]:
        """The partitions of these subjects, and of those that begin so; ``SubjectNotFound`` where there is none."""
        wanted = set(subjects)
        prefixes = list(prefixes)
        if prefixes:
            known = await self._patiently(self._subjects)
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
        return await self._patiently(functools.partial(self._router.refresh, subject, create=False))

    async def _subjects(self) -> list[str]:
        """All there are."""
        found: set[str] = set()
        for node in await self._router.all_nodes():
            answer: m.AdminReply = await node.request(m.AdminRequest("subject.list"))
            found.update(each["subject"] for each in msgspec.msgpack.decode(answer.result))
        return sorted(found)

    async def spans(self, places: Sequence[PartitionName], times: Sequence[int] = ()) -> list[PartitionSpan]:
        """What each partition has now; those that their brokers do not have are left out."""
        found: list[PartitionSpan] = []
        for group, members in _by_group(places).items():
            for some in _pages(members):
                names = [place.name for place in some]
                answer = await self._ask(some[0], "partition.spans", {"names": names, "times": list(times)})
                spans = msgspec.msgpack.decode(answer, type=list[PartitionSpan])
                found += [msgspec.structs.replace(span, group=group) for span in spans]
        return found

    async def cuts(self, ranges: Sequence[SpanRange], size: int) -> list[SpanCuts]:
        """Cut each range into pieces of at most about ``size`` bytes; 0: only measure them."""
        return await self._cut(ranges, [size] * len(ranges), reach=False)

    async def reach(self, ranges: Sequence[SpanRange], sizes: Sequence[int]) -> list[SpanCuts]:
        """How far each of the sizes reaches from the start of its range: one cut each."""
        return await self._cut(ranges, sizes, reach=True)

    async def _cut(self, ranges: Sequence[SpanRange], sizes: Sequence[int], *, reach: bool) -> list[SpanCuts]:
        found: dict[int, SpanCuts] = {}
        indexes: dict[str, list[int]] = {}
        for index, each in enumerate(ranges):
            indexes.setdefault(each.place.group, []).append(index)
        for members in indexes.values():
            for some in _pages(members):
                asked = [(ranges[i].place.name, ranges[i].start, ranges[i].end, sizes[i]) for i in some]
                arguments = {"ranges": asked, "reach": reach}
                answer = await self._ask(ranges[some[0]].place, "partition.cuts", arguments)
                found.update(zip(some, msgspec.msgpack.decode(answer, type=list[SpanCuts]), strict=True))
        return [found[index] for index in range(len(ranges))]

    async def _ask(self, place: PartitionName, operation: str, arguments: dict[str, Any]) -> msgspec.Raw:
        async def ask() -> msgspec.Raw:
            answer: m.AdminReply = await self.node(place).request(m.AdminRequest(operation, arguments))
            return answer.result

        return await self._patiently(ask)

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask again while nobody is there."""
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
