"""The processes of the demo: started apart, heard through pipes, and ended whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

STOP_SECONDS = 15.0


class DemoFailed(Exception):
    """A part of the demo did not do what it has to; the message says which and how."""


class Child:
    """One Python module run as a process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def lines(self) -> AsyncIterator[str]:
        """What it prints, until it ends."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            yield line.decode().rstrip("\n")

    async def records(self, size: int) -> AsyncIterator[bytes]:
        """What it writes, in whole records; one that it was killed in is dropped."""
        assert self._process.stdout is not None
        rest = b""
        while block := await self._process.stdout.read(1 << 20):
            data = rest + block
            whole = len(data) - len(data) % size
            rest = data[whole:]
            if whole:
                yield data[:whole]

    def say(self, line: str) -> None:
        """A line on its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def end(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait; a process that does not end in time is killed, which fails the demo."""
        if self.running:
            self.send_signal(number)
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                raise DemoFailed(f"{self.name} did not end within {STOP_SECONDS:g} s") from None
        return await self._process.wait()

    async def succeed(self) -> None:
        """Wait for its end, which must be a good one."""
        code = await self._process.wait()
        if code != 0:
            raise DemoFailed(f"{self.name} ended with code {code}: {self.last_words()}")

    def last_words(self) -> str:
        """The end of its standard error."""
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        return " | ".join(line.strip() for line in lines[-8:] if line.strip()) or "it said nothing"


class Children:
    """All of them; leaving kills what is left."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._all: list[tuple[Child, asyncio.subprocess.Process]] = []

    async def start(self, name: str, module: str, *arguments: str) -> Child:
        """Run ``python -m module``."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                # A Ctrl-C at the terminal is for the parent, which ends them in order.
                start_new_session=True,
            )
        child = Child(name, process, log)
        self._all.append((child, process))
        return child

    async def __aenter__(self) -> Children:
        return self

    async def __aexit__(self, *error: object) -> None:
        for child, process in self._all:
            if child.running:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        for _, process in self._all:
            # Reads what is left too, so that the pipe is closed.
            await process.communicate()
