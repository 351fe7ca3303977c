"""``plait serve --groups N``: the additional broker groups of a node, each a process with its own data directory.

They start after the node and stop before it. If one ends by itself, the node ends: a node without a part of its
messages must not look healthy.
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
from plait.storage.disk import GROUPS

log = logging.getLogger("plait.serve")

#: The most broker groups of one node.
GROUPS_MAX: Final = 64


def check_groups(data: Path, count: int) -> None:
    """Refuse an invalid number, and fewer groups than the node has: their messages would be unreachable."""
    if not 1 <= count <= GROUPS_MAX:
        raise InvalidArgument(f"--groups {count} is out of range; use 1 to {GROUPS_MAX}")
    names = [path.name for path in (data / GROUPS).glob("g*")] if (data / GROUPS).is_dir() else []
    largest = max((int(name[1:]) for name in names if re.fullmatch(r"g[1-9]\d*", name)), default=1)
    if largest > count:
        raise InvalidArgument(f"{data} has {largest} broker groups; use --groups {largest}, or more")


class GroupProcesses:
    """The groups ``g2`` to ``gN``, as child processes."""

    def __init__(self, data: Path, count: int, options: Sequence[str]) -> None:
        self._data = data
        self._options = options
        self._numbers = range(2, count + 1)
        self._children: list[Child] = []

    async def start(self, meta: str) -> None:
        """Start all of them concurrently, without a limit of time: recovery may be long."""
        self._children = [self._child(f"g{number}", meta) for number in self._numbers]
        starting = [tasks.child(child.start(None), "plait-group") for child in self._children]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                # Ends the children that are not ready yet.
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self.stop()
            raise
        for child in self._children:
            log.info("%s is ready at %s, process %d", child.name, child.address, child.pid)

    async def ended(self) -> Unavailable:
        """Wait until one of them ends by itself and return the error. Without groups it never returns."""
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
        for result in await asyncio.gather(*(child.stop() for child in self._children), return_exceptions=True):
            if isinstance(result, BaseException):
                log.warning("a broker group had to be killed: %r", result)
        self._children = []

    def _child(self, group: str, meta: str) -> Child:
        data = self._data / GROUPS / group
        place = ("--group", group, "--meta", meta, "--data", str(data))
        return Child(f"broker group {group}", "broker", *place, *self._options, quiet=False)
