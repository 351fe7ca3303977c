"""The processes of the demo: started, read through pipes, and ended in every case."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

STOP_SECONDS = 15.0


class DemoFailed(Exception):
    """A part of the demo failed; the message names the part and the reason."""


class Child:
    """A Python module that runs as a process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def lines(self) -> AsyncIterator[str]:
        """The lines of its standard output, until it ends."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            yield line.decode().rstrip("\n")

    async def records(self, size: int) -> AsyncIterator[bytes]:
        """The records of its standard output. A partial record of a killed process is dropped."""
        assert self._process.stdout is not None
        rest = b""
        while block := await self._process.stdout.read(1 << 20):
            data = rest + block
            whole = len(data) - len(data) % size
            rest = data[whole:]
            if whole:
                yield data[:whole]

    def write_line(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end. A process that does not end in time is killed, and the demo fails."""
        if self.running:
            self.send_signal(number)
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                raise DemoFailed(f"{self.name} did not end within {STOP_SECONDS:g} s") from None
        return await self._process.wait()

    async def succeed(self) -> None:
        """Wait for its end; raises ``DemoFailed`` unless the exit code is 0."""
        code = await self._process.wait()
        if code != 0:
            raise DemoFailed(f"{self.name} ended with code {code}: {self.stderr_tail()}")

    def stderr_tail(self) -> str:
        """The last lines of its standard error."""
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        return " | ".join(line.strip() for line in lines[-8:] if line.strip()) or "no output"


class Children:
    """All processes; leaving the block kills those that still run."""

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
                # Ctrl-C at the terminal goes to the parent only, which ends the children in order.
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
            # Read the rest of the output, so that the pipe is closed.
            await process.communicate()
