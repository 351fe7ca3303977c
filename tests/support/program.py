"""A Python module run as a process that tests stop, kill and start again."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.process import READY_SECONDS

ROOT = Path(__file__).parents[2]


class Program:
    """``python -m module arguments``; ``arguments`` returns them for each start, counted from 1."""

    def __init__(self, name: str, directory: Path, module: str, arguments: Callable[[int], Sequence[str]]) -> None:
        self.name = name
        self.lives = 0
        #: The words after ``ready`` in the output of the last start.
        self.output: list[str] = []
        self._module = module
        self._arguments = arguments
        self._path = directory / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        #: Held while the program is stopped, until it runs again.
        self.lock = asyncio.Lock()

    @property
    def log(self) -> str:
        """Everything that was written to standard error."""
        return self._path.read_text(errors="replace") if self._path.exists() else ""

    @property
    def code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    async def start(self, *, again: int | None = None) -> None:
        """Start it and wait until it is ready; try again if it ends with the exit code ``again`` before that."""
        assert self._process is None, f"{self.name} runs already"
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                return await self._start()
            except AssertionError:
                assert self._process is not None
                code = await asyncio.to_thread(self._process.wait, READY_SECONDS)
                if again is None or code != again or time.monotonic() > deadline:
                    raise
                self.kill()

    async def _start(self) -> None:
        self.lives += 1
        command = [sys.executable, "-m", self._module, *self._arguments(self.lives)]
        self._process = self._spawn(command)
        await asyncio.to_thread(self._wait_ready, self._process)

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self._path.open("ab") as log:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=ROOT)

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        deadline = time.monotonic() + READY_SECONDS
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0.0))
            piece = os.read(process.stdout.fileno(), 4096) if readable else b""
            if not piece:
                raise AssertionError(f"{self.name} did not start: {line!r}\n{self.log[-4000:]}")
            line += piece
        word, *self.output = line.decode().split()
        assert word == "ready", line

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it with a signal; returns the exit code. Does nothing if it does not run."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        code = await asyncio.to_thread(process.wait, READY_SECONDS)
        self._close(process)
        return code

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._close(process)

    def _close(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdout is not None:
            process.stdout.close()
