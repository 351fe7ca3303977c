"""Servers as child processes: ``Child`` runs any serving command, ``OwnNode`` runs ``plait serve``.

``GroupProcesses`` runs the additional broker groups of a node. A child is stopped when its parent ends, also when the
parent is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import logging
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from plait import tasks
from plait.errors import InvalidArgument, Unavailable
from plait.storage.disk import GROUPS

log = logging.getLogger("plait.serve")

START_SECONDS = 30.0
STOP_SECONDS = 30.0

#: prctl(2): the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG: Final = 1


class Child:
    """A ``plait`` command that serves and prints a ready line. ``name`` is used in messages."""

    def __init__(self, name: str, *arguments: str, log: Path | None = None, quiet: bool = True) -> None:
        """Its standard error goes to ``log``; without one it is discarded, or inherited unless ``quiet``."""
        self.name = name
        self.address = ""
        self._arguments = arguments
        self._log = log
        self._quiet = quiet
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, seconds: float | None = START_SECONDS) -> None:
        """Start it and wait until it is ready. Raises ``Unavailable`` if it ends or is not ready in time."""
        with contextlib.ExitStack() as stack:
            default = asyncio.subprocess.DEVNULL if self._quiet else None
            errors = stack.enter_context(self._log.open("ab")) if self._log else default
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "plait.cli", *self._arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                # Ctrl-C at the terminal goes to the parent only, which stops the child in order.
                start_new_session=True,
                # A killed parent stops the child too: the child holds a data directory that the next one needs.
                preexec_fn=functools.partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM),
            )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                line = (await self._process.stdout.readline()).decode()
        except TimeoutError:
            await self.kill()
            raise Unavailable(f"{self.name} was not ready within {seconds:g} s") from None
        except BaseException:
            await self.kill()
            raise
        if not line.startswith("ready "):
            raise Unavailable(f"{self.name} ended with code {await self.ended()} before it was ready")
        self.address = line.split()[1]

    async def ended(self) -> int:
        """Wait for its end and return the exit code; for a signal as a shell reports it."""
        assert self._process is not None
        code = await self._process.wait()
        return 128 - code if code < 0 else code

    async def stop(self) -> int:
        """Drain it, wait for its end and return the exit code. Kills it if it does not end in time."""
        process = self._process
        if process is None:
            return 0
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await process.wait()
            except BaseException:
                await self.kill()
                raise
        assert process.returncode is not None
        return process.returncode

    async def kill(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


class OwnNode(Child):
    """A node on a data directory and a free port; an async context manager that starts and stops it."""

    def __init__(self, data: Path, *options: str, log: Path | None = None) -> None:
        self.data = data
        super().__init__(f"the node on {data}", "serve", "--data", str(data), "--port", "0", *options, log=log)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


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
    """The additional broker groups ``g2`` to ``gN`` of a node, each a process with its own data directory.

    They start after the node and stop before it. If one ends by itself, the node ends: a node without a part of its
    messages must not look healthy.
    """

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
