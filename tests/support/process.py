"""A real server in its own process: ``plait serve``, or the same server with settings that have no option."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

#: The longest wait for a start. A machine under load may take long to start an interpreter.
READY_SECONDS = 180.0

#: The program for ``settings``: fields of ``BrokerConfig``, as JSON in the last argument.
_SCRIPT = """
import asyncio, json, sys, uvloop
from plait.broker import BrokerConfig
from plait.server import Server
from plait.storage.disk import RealDisk

async def main(data, port, settings):
    server = Server(RealDisk(data), BrokerConfig(**settings), port=port)
    await server.start()
    print("ready", server.address, flush=True)
    await server.failed

uvloop.run(main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])))
"""


class ServerProcess:
    """One data directory and the process that serves it; every start uses the same port.

    ``with ServerProcess(directory) as server`` makes sure that no process outlives the block.
    """

    def __init__(self, data: Path, *, flush: str = "async", settings: dict[str, Any] | None = None) -> None:
        self.data = data
        self.flush = flush
        self.settings = settings
        self.port = 0
        self.address = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._log = data.with_name(data.name + ".log")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """Everything the processes wrote to standard error."""
        return self._log.read_text() if self._log.exists() else ""

    def spawn(self) -> None:
        """Start the process; ``wait_ready`` waits until it serves."""
        assert self._process is None, "it runs already"
        if self.settings is None:
            arguments = ["-m", "plait.cli", "serve", "--data", str(self.data), "--port", str(self.port)]
            arguments += ["--flush", self.flush, "--segment-size", "17MiB"]
        else:
            settings = json.dumps({**self.settings, "flush": self.flush})
            arguments = ["-c", _SCRIPT, str(self.data), str(self.port), settings]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=log)

    def wait_ready(self) -> None:
        """Wait until it has printed ``ready``."""
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + READY_SECONDS
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([self._process.stdout], [], [], deadline - time.monotonic())
            piece = os.read(self._process.stdout.fileno(), 4096) if readable else b""
            if not piece:
                raise AssertionError(f"the server did not start: {line!r}\n{self.log[-4000:]}")
            line += piece
        word, self.address = line.decode().split()[:2]
        assert word == "ready", line
        self.port = int(self.address.rpartition(":")[2])

    def start(self) -> None:
        """Start and wait."""
        self.spawn()
        self.wait_ready()

    def ended(self, seconds: float) -> bool:
        """Whether the process ends by itself within this time."""
        assert self._process is not None
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Send SIGKILL. Does nothing if it does not run."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(READY_SECONDS)
            assert process.stdout is not None
            process.stdout.close()
