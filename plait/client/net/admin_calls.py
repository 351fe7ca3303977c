"""Management requests by name: who is asked, and what they answer.

What is about a subject is asked of each of its partitions, by the partition's name, at the broker that has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import msgspec

from plait.client.net.node import Node
from plait.client.net.router import Router
from plait.client.types import PartitionName
from plait.errors import GroupNotFound, InvalidArgument, PlaitError, SubjectNotFound
from plait.wire import messages as m

_T = TypeVar("_T")

#: Which partition is meant: "name@group", the name alone where that is enough, or what receipts and messages have.
Partition = str | PartitionName


class PartitionNode(NamedTuple):
    """A partition, and the node that has it."""

    name: PartitionName
    node: Node


class Calls:
    """What every part of ``client.admin`` is built on."""

    def __init__(self, router: Router, now: Callable[[], int]) -> None:
        self._router = router
        #: Microseconds since 1970: what times from now on are counted from.
        self._now = now

    async def _run(self, operation: str, kind: Any, *, at: Node | None = None, **arguments: Any) -> Any:
        """Ask one node; the meta server, if none is named."""
        request = m.AdminRequest(operation, arguments)
        try:
            m.encode(request)
        except (OverflowError, TypeError, UnicodeEncodeError) as error:
            raise InvalidArgument(f"{operation} cannot be asked for with these arguments: {error}") from None
        reply: m.AdminReply = await (at or self._router.meta).request(request)
        return msgspec.msgpack.decode(reply.result, type=kind)

    async def _places(self, subject: str, partition: Partition | None = None) -> list[PartitionNode]:
        """The subject's partitions, or the one that is named."""
        route = await self._router.refresh(subject, create=False)
        names = route.partitions if partition is None else [_named(subject, partition, route.partitions)]
        return [PartitionNode(name, self._router.node(route, name.group)) for name in names]

    async def _place(self, subject: str, partition: Partition | None, what: str) -> PartitionNode:
        """The one partition that is meant, where something is named that each counts for itself."""
        places = await self._places(subject, partition)
        if len(places) > 1:
            raise InvalidArgument(
                f"{subject!r} has {len(places)} partitions, each with {what} of its own: say which, "
                f"as in partition={str(places[0].name)!r}"
            )
        return places[0]

    async def _each(
        self, places: list[PartitionNode], operation: str, kind: Any, **arguments: Any
    ) -> list[tuple[PartitionNode, Any]]:
        """Ask all of them at once; those that have no such thing have no part in it, unless none has."""
        return await self._all(
            places, lambda place: self._run(operation, kind, at=place.node, subject=place.name.name, **arguments)
        )

    async def _all(
        self, places: list[PartitionNode], ask: Callable[[PartitionNode], Awaitable[_T]]
    ) -> list[tuple[PartitionNode, _T]]:
        """The same with whatever is to be asked of each."""
        answers = await asyncio.gather(*(ask(place) for place in places), return_exceptions=True)
        found: list[tuple[PartitionNode, _T]] = []
        missing: PlaitError | None = None
        for place, answer in zip(places, answers, strict=True):
            if isinstance(answer, SubjectNotFound | GroupNotFound):
                missing = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found.append((place, answer))
        if missing is not None and not found:
            raise missing
        return found

    async def _everywhere(self, operation: str, kind: Any, **arguments: Any) -> list[Any]:
        """Ask every broker there is."""
        nodes = await self._router.all_nodes()
        return list(await asyncio.gather(*(self._run(operation, kind, at=node, **arguments) for node in nodes)))


def _named(subject: str, partition: Partition, names: list[PartitionName]) -> PartitionName:
    if not isinstance(partition, str | PartitionName):
        raise InvalidArgument(f"partition {partition!r} is a {type(partition).__name__}; use 'name@group'")
    meant = [name for name in names if str(partition) in (str(name), name.name)]
    if len(meant) == 1:
        return meant[0]
    which = "several" if meant else "no"
    raise InvalidArgument(f"{subject!r} has {which} partitions {str(partition)!r}; it has {', '.join(map(str, names))}")
