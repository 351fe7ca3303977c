"""A node of one's own: ``plait serve`` as a child process on a directory and a free port, while it is needed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from plait.errors import Unavailable

START_SECONDS = 30.0
STOP_SECONDS = 30.0


class OwnNode:
    """Starts with ``async with``; leaving drains and ends it, or kills it where it does not end in time."""

    def __init__(self, data: Path, *options: str, log: Path | None = None) -> None:
        self.data = data
        self._options = options
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self.address = ""

    async def __aenter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            errors = stack.enter_context(self._log.open("ab")) if self._log else asyncio.subprocess.DEVNULL
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "plait.cli", "serve", "--data", str(self.data), "--port", "0"),
                *self._options,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                # A Ctrl-C at the terminal is for its parent, which stops it in order.
                start_new_session=True,
            )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                line = (await self._process.stdout.readline()).decode()
        except TimeoutError:
            await self._kill()
            raise Unavailable(f"the node on {self.data} was not ready within {START_SECONDS:g} s") from None
        except BaseException:
            await self._kill()
            raise
        if not line.startswith("ready "):
            code = await self._process.wait()
            raise Unavailable(f"the node on {self.data} ended with code {code} before it was ready")
        self.address = line.split()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> int:
        """Drain and end; its exit code."""
        process = self._process
        assert process is not None
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await process.wait()
            except BaseException:
                await self._kill()
                raise
        assert process.returncode is not None
        return process.returncode

    async def _kill(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
