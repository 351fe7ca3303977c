"""``plait serve --groups N``: the broker groups beside a node's own, each a process with a directory of its own.

They belong to the node: they start after it and stop before it, and one that ends by itself ends the node, as a node
that has lost a part of its messages must not look well.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from plait import tasks
from plait.cli.serving.child_process import Child
from plait.errors import InvalidArgument, Unavailable

log = logging.getLogger("plait.serve")

#: Processes of one node.
GROUPS_MAX: Final = 64
#: Where the directories of the other groups are, in the node's.
DIRECTORY: Final = "groups"


def check_groups(data: Path, count: int) -> None:
    """Refuse what cannot be, and fewer than there are: their messages would be out of reach."""
    if not 1 <= count <= GROUPS_MAX:
        raise InvalidArgument(f"--groups {count} is not possible; use 1 to {GROUPS_MAX}")
    names = [path.name for path in (data / DIRECTORY).glob("g*")] if (data / DIRECTORY).is_dir() else []
    largest = max((int(name[1:]) for name in names if re.fullmatch(r"g[1-9]\d*", name)), default=1)
    if largest > count:
        raise InvalidArgument(f"{data} has {largest} broker groups; say --groups {largest}, or more")


class Groups:
    """The groups ``g2`` to ``gN``, as child processes."""

    def __init__(self, data: Path, count: int, options: Sequence[str]) -> None:
        self._data = data
        self._options = options
        self._numbers = range(2, count + 1)
        self._children: list[Child] = []

    async def start(self, meta: str) -> None:
        """All of them, side by side, however long they take to recover."""
        self._children = [self._child(f"g{number}", meta) for number in self._numbers]
        starting = [tasks.child(child.start(None), "plait-group") for child in self._children]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                # Who is not ready yet is ended.
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self.stop()
            raise
        for child in self._children:
            log.info("%s is ready at %s, process %d", child.name, child.address, child.pid)

    async def ended(self) -> Unavailable:
        """Until one of them ends by itself; never where there are none."""
        waiting = {tasks.child(child.ended(), "plait-group"): child for child in self._children}
        if not waiting:
            await asyncio.get_running_loop().create_future()
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        first = next(iter(done))
        return Unavailable(f"{waiting[first].name} ended with code {first.result()}; the node stops, start it again")

    async def stop(self) -> None:
        """End them in order."""
        for result in await asyncio.gather(*(child.stop() for child in self._children), return_exceptions=True):
            if isinstance(result, BaseException):
                log.warning("a broker group had to be killed: %r", result)
        self._children = []

    def _child(self, group: str, meta: str) -> Child:
        data = self._data / DIRECTORY / group
        place = ("--group", group, "--meta", meta, "--data", str(data))
        return Child(f"broker group {group}", "broker", *place, *self._options, quiet=False)
