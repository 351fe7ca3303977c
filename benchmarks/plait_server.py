"""A private Plait server for measurements: a real `plait serve` process on a free port, removed afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

import psutil

START_SECONDS_MAX = 60.0


class PlaitServer:
    """A context manager; clients connect to ``address``."""

    def __init__(
        self,
        *,
        flush: str = "async",
        data: Path | None = None,
        options: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self._flush = flush
        self._own = data is None
        self.data = data or Path(tempfile.mkdtemp(prefix="plait-bench-"))
        self._options = options
        self._environment = environment or dict(os.environ)
        self._process: subprocess.Popen[str] | None = None
        self.address = ""
        self.ready_seconds = 0.0

    def start(self) -> None:
        """Start, and wait for the ready line."""
        command = [
            sys.executable,
            "-m",
            "plait.cli",
            "serve",
            "--data",
            str(self.data),
            "--port",
            "0",
            "--log-level",
            "warning",
        ]
        started = time.monotonic()
        self._process = subprocess.Popen(
            [*command, "--flush", self._flush, *self._options], stdout=subprocess.PIPE, text=True, env=self._environment
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ready"):
                self.ready_seconds = time.monotonic() - started
                self.address = line.split()[1]
                return
        raise RuntimeError(f"plait serve ended with {self._process.wait()} before it was ready")

    def kill(self) -> None:
        """End the server with SIGKILL, like a crash."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(START_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None

    def cpu_seconds(self) -> float:
        """CPU time of the server's threads so far, in nanosecond resolution; the process clock ticks every 10 ms."""
        assert self._process is not None
        threads = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9

    def resident_bytes(self) -> int:
        """Resident memory of the server itself, without the pages of mapped log files in the page cache."""
        assert self._process is not None
        memory = psutil.Process(self._process.pid).memory_info()
        return int(memory.rss - memory.shared)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._own:
            shutil.rmtree(self.data, ignore_errors=True)
