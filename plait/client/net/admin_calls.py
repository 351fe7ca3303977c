"""Sends admin requests to the right nodes, and decodes their replies.

A request about a subject goes to each of its partitions, at the broker of the partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

from plait.client.net.node import Node
from plait.client.net.router import Router
from plait.client.types import PartitionName
from plait.errors import GroupNotFound, InvalidArgument, PlaitError, SubjectNotFound
from plait.wire import codec
from plait.wire.admin.operation import Operation

_T = TypeVar("_T")

#: A partition: "name@group", the name alone if it is unique, or the ``partition`` of a receipt or message.
Partition = str | PartitionName


class PartitionNode(NamedTuple):
    """A partition and the node of its broker."""

    name: PartitionName
    node: Node


class Calls:
    """The requests that every part of ``client.admin`` uses."""

    def __init__(self, router: Router, now: Callable[[], int]) -> None:
        self._router = router
        #: The current time in microseconds since 1970; relative times count from it.
        self._now = now

    async def _run(self, operation: Operation[_T], *, at: Node | None = None, **arguments: Any) -> _T:
        """Send a request to one node, by default the meta server."""
        try:
            request = operation.packet(**arguments)
            codec.encode(request)
        except (OverflowError, TypeError, UnicodeEncodeError) as error:
            raise InvalidArgument(f"the arguments of {operation.name} cannot be encoded: {error}") from None
        return operation.result(await (at or self._router.meta).request(request))

    async def _places(self, subject: str, partition: Partition | None = None) -> list[PartitionNode]:
        """The nodes of all partitions of a subject, or of the given one."""
        route = await self._router.refresh(subject, create=False)
        names = route.partitions if partition is None else [_named(subject, partition, route.partitions)]
        return [PartitionNode(name, self._router.node(route, name.group)) for name in names]

    async def _place(self, subject: str, partition: Partition | None, what: str) -> PartitionNode:
        """The node of the only partition, or of the given one. ``what`` is numbered separately by each partition."""
        places = await self._places(subject, partition)
        if len(places) > 1:
            raise InvalidArgument(
                f"{subject!r} has {len(places)} partitions, each with {what} of its own: name one, "
                f"as in partition={str(places[0].name)!r}"
            )
        return places[0]

    async def _each(
        self, places: list[PartitionNode], operation: Operation[_T], **arguments: Any
    ) -> list[tuple[PartitionNode, _T]]:
        """Send a request to all partitions at once. ``_all`` describes the result."""
        return await self._all(
            places, lambda place: self._run(operation, at=place.node, subject=place.name.name, **arguments)
        )

    async def _all(
        self, places: list[PartitionNode], ask: Callable[[PartitionNode], Awaitable[_T]]
    ) -> list[tuple[PartitionNode, _T]]:
        """Ask all partitions at once. Leaves out partitions without the subject or the group; raises if none has it."""
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

    async def _everywhere(self, operation: Operation[_T], **arguments: Any) -> list[_T]:
        """Send a request to every broker."""
        nodes = await self._router.all_nodes()
        return list(await asyncio.gather(*(self._run(operation, at=node, **arguments) for node in nodes)))


def _named(subject: str, partition: Partition, names: list[PartitionName]) -> PartitionName:
    if not isinstance(partition, str | PartitionName):
        raise InvalidArgument(f"partition {partition!r} is a {type(partition).__name__}; use 'name@group'")
    meant = [name for name in names if str(partition) in (str(name), name.name)]
    if len(meant) == 1:
        return meant[0]
    which = "several" if meant else "no"
    raise InvalidArgument(f"{subject!r} has {which} partitions {str(partition)!r}; it has {', '.join(map(str, names))}")
