"""Servers as child processes: ``Child`` runs any serving command, ``OwnNode`` runs ``plait serve``.

A child is stopped when its parent ends, also when the parent is killed.
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
