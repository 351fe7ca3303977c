"""Servers as child processes: ``Child`` is one of any kind, ``OwnNode`` a ``plait serve`` of one's own.

They go with their parent, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from plait.errors import Unavailable

START_SECONDS = 30.0
STOP_SECONDS = 30.0

#: prctl(2): which signal a process gets when its parent is gone.
_PR_SET_PDEATHSIG: Final = 1


class Child:
    """A command of ours that serves; it says when it is ready. ``name`` is for whoever reads of it."""

    def __init__(self, name: str, *arguments: str, log: Path | None = None, quiet: bool = True) -> None:
        """Its standard error goes to ``log``; without one nowhere, or, unless ``quiet``, where the parent's goes."""
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
        """Begin; returns when it is ready. ``Unavailable``: it has ended, or was not ready in time."""
        with contextlib.ExitStack() as stack:
            nowhere = asyncio.subprocess.DEVNULL if self._quiet else None
            errors = stack.enter_context(self._log.open("ab")) if self._log else nowhere
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "plait.cli", *self._arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                # A Ctrl-C at the terminal is for its parent, which stops it in order.
                start_new_session=True,
                # One that is killed takes it with it, in order: it holds a directory that the next one wants.
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
        """Its exit code, once it has one; that of a shell where a signal has ended it."""
        assert self._process is not None
        code = await self._process.wait()
        return 128 - code if code < 0 else code

    async def stop(self) -> int:
        """Drain and end; its exit code. It is killed where it does not end in time."""
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
        """End it at once."""
        assert self._process is not None
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


class OwnNode(Child):
    """A node on a directory and a free port. Starts with ``async with``; leaving drains and ends it."""

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
