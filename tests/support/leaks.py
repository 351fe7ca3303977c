"""Checks that no process, listening port, network namespace or mount of a test run outlives it.

A process belongs to the run if it descends from the run or has the run's token in its environment; the token also
finds daemons that were orphaned on purpose. A namespace or mount belongs to the run if it appeared during the run,
unless its name has the process id of another live run. `run_name` makes such names, so that two runs on one machine
do not report each other's namespaces and mounts.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import psutil

TOKEN_VARIABLE = "PLAIT_TEST_RUN"
#: Processes that the interpreter starts for itself. They end with it and cannot be ended before.
_OF_THE_INTERPRETER = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
#: The first `ip netns add` on a machine mounts this directory, and it stays mounted.
_OF_IPROUTE = "/run/netns"
_RUN_NAME = re.compile(r"plait-(\d+)-")


def run_name(suffix: str) -> str:
    """A name for a namespace or a mount point that has the process id of the run."""
    return f"plait-{os.getpid()}-{suffix}"


def mark_run() -> str:
    """Put this run's token into the environment that children inherit; a run inside a run has both tokens."""
    token = f"{os.getpid()}.{int(psutil.Process().create_time() * 1000)}"
    outer = os.environ.get(TOKEN_VARIABLE)
    if token not in (outer or "").split(":"):
        os.environ[TOKEN_VARIABLE] = f"{outer}:{token}" if outer else token
    return token


@dataclass(frozen=True)
class Traces:
    """The processes, ports, namespaces and mounts of a run at one moment, with descriptions."""

    processes: dict[psutil.Process, str] = field(default_factory=dict)
    ports: dict[tuple[int, str], str] = field(default_factory=dict)
    namespaces: frozenset[str] = frozenset()
    mounts: frozenset[str] = frozenset()

    def beyond(self, before: Traces) -> list[str]:
        """What appeared since ``before``, one line each."""
        lines = [f"process {text}" for process, text in self.processes.items() if process not in before.processes]
        lines += [f"port {text}" for port, text in self.ports.items() if port not in before.ports]
        lines += [f"namespace {name}" for name in sorted(self.namespaces - before.namespaces)]
        lines += [f"mount {point}" for point in sorted(self.mounts - before.mounts)]
        return lines


def observe(token: str) -> Traces:
    """The traces of the run with this token. Its processes are found wherever they are in the process tree."""
    processes = _processes(token)
    return Traces(
        processes={process: _describe(process) for process in processes},
        ports=_ports([psutil.Process(), *processes]),
        namespaces=frozenset(name for name in _namespaces() if not _of_another_run(name)),
        mounts=frozenset(point for point in _mounts() if point != _OF_IPROUTE and not _of_another_run(point)),
    )


def end_processes(before: Traces, after: Traces) -> None:
    """End leaked processes, so that they do not disturb the next run."""
    leaked = [process for process in after.processes if process not in before.processes]
    for process in leaked:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(leaked, timeout=5)


def settle(token: str, before: Traces, seconds: float) -> Traces:
    """Observe the run after processes that are ending have had time to end."""
    ending = [process for process in _processes(token) if process not in before.processes]
    if ending:
        psutil.wait_procs(ending, timeout=seconds)
    return observe(token)


def _processes(token: str) -> list[psutil.Process]:
    own = psutil.Process()
    found = set(own.children(recursive=True))
    for process in psutil.process_iter():
        try:
            if token in process.environ().get(TOKEN_VARIABLE, "").split(":"):
                found.add(process)
        except psutil.Error:
            continue
    found.discard(own)
    for ancestor in own.parents():
        found.discard(ancestor)
    return [process for process in found if _lives(process)]


def _lives(process: psutil.Process) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return not any(name in command for name in _OF_THE_INTERPRETER)


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"{process.pid}: ended meanwhile"


def _ports(processes: list[psutil.Process]) -> dict[tuple[int, str], str]:
    found: dict[tuple[int, str], str] = {}
    for process in processes:
        try:
            connections = process.net_connections(kind="inet")
        except psutil.Error:
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN:
                address = f"{connection.laddr.ip}:{connection.laddr.port}"
                found[process.pid, address] = f"{address} of process {process.pid}"
    return found


def _namespaces() -> list[str]:
    directory = Path(_OF_IPROUTE)
    return [entry.name for entry in directory.iterdir()] if directory.is_dir() else []


def _mounts() -> list[str]:
    table = Path("/proc/self/mountinfo")
    return [line.split()[4] for line in table.read_text().splitlines()] if table.exists() else []


def _of_another_run(name: str) -> bool:
    return any(int(pid) != os.getpid() and psutil.pid_exists(int(pid)) for pid in _RUN_NAME.findall(name + "-"))
