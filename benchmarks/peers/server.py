"""A server that belongs to the benchmark: its own port and data directory, ended by its process id.

`stop()` always ends the process with all its children and removes the directory. Only processes that were
started here are signalled.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.clients import client_module
from benchmarks.peers.errors import PeerError

LOOPBACK = "127.0.0.1"
START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 20.0
POLL_SECONDS = 0.05
LOG_TAIL_SIZE = 2_000


class ServerProcess:
    """One started server process with its children, and the temporary directory it lives in."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.directory = Path(tempfile.mkdtemp(prefix=f"plait-bench-{name}-"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        command: Sequence[str],
        ready: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
        seconds_max: float = START_SECONDS_MAX,
    ) -> None:
        """Run `command` in the directory and return once `ready()`; raise PeerError with the log if that takes
        too long."""
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                list(command),
                cwd=self.directory,
                env=None if environment is None else dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # An interrupt must reach the benchmark first, which then ends its servers.
                start_new_session=True,
            )
        deadline = time.monotonic() + seconds_max
        while not ready():
            status = self._process.poll()
            if status is not None:
                raise PeerError(f"{self.name} ended with status {status} while starting:\n{self._log_tail()}")
            if time.monotonic() > deadline:
                raise PeerError(f"{self.name} did not serve within {seconds_max:.0f} s:\n{self._log_tail()}")
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """End the process and its children, with SIGTERM first, and remove the directory. Idempotent."""
        if self._process is not None:
            psutil = client_module("psutil")
            family = self._family()
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            _, alive = psutil.wait_procs([member for member in family if member.is_running()], timeout=2.0)
            for member in alive:
                member.kill()
            psutil.wait_procs(alive, timeout=STOP_SECONDS_MAX)
            self._process = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def cpu_seconds(self) -> float:
        """CPU time of the process and its living children so far."""
        psutil = client_module("psutil")
        total = 0.0
        for member in self._family():
            try:
                times = member.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    def resident_size(self) -> int:
        """Resident bytes of the process and its children."""
        psutil = client_module("psutil")
        total = 0
        for member in self._family():
            try:
                total += member.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total

    @property
    def _log_path(self) -> Path:
        return self.directory / "server.log"

    def _log_tail(self) -> str:
        return self._log_path.read_bytes()[-LOG_TAIL_SIZE:].decode(errors="replace")

    def _family(self) -> list[Any]:
        if self._process is None:
            return []
        psutil = client_module("psutil")
        try:
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def machine_busy_seconds() -> float:
    """CPU time of all processes on this machine so far."""
    times = client_module("psutil").cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def free_port(neighbours: Sequence[int] = ()) -> int:
    """A free loopback port whose neighbours at the given distances are free as well."""
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            port = int(probe.getsockname()[1])
        if all(_is_free(port + distance) for distance in neighbours):
            return port
    raise PeerError("no free loopback port found in 100 tries")


def accepts(port: int) -> bool:
    """Whether something listens on the loopback port."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1.0):
            return True
    except OSError:
        return False


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
