"""Checks that no process and no listening port of a test run outlives it.

A process belongs to the run if it descends from the run or has the run's token in its environment; the token also
finds daemons that were orphaned on purpose.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import psutil

TOKEN_VARIABLE = "PLAIT_TEST_RUN"
#: Processes that the interpreter starts for itself. They end with it and cannot be ended before.
_OF_THE_INTERPRETER = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def mark_run() -> str:
    """Put this run's token into the environment that children inherit; a run inside a run has both tokens."""
    token = f"{os.getpid()}.{int(psutil.Process().create_time() * 1000)}"
    outer = os.environ.get(TOKEN_VARIABLE)
    if token not in (outer or "").split(":"):
        os.environ[TOKEN_VARIABLE] = f"{outer}:{token}" if outer else token
    return token


@dataclass(frozen=True)
class Traces:
    """The processes and ports of a run at one moment, with descriptions."""

    processes: dict[psutil.Process, str] = field(default_factory=dict)
    ports: dict[tuple[int, str], str] = field(default_factory=dict)

    def beyond(self, before: Traces) -> list[str]:
        """What appeared since ``before``, one line each."""
        lines = [f"process {text}" for process, text in self.processes.items() if process not in before.processes]
        return lines + [f"port {text}" for port, text in self.ports.items() if port not in before.ports]


def observe(token: str) -> Traces:
    """The traces of the run with this token. Its processes are found wherever they are in the process tree."""
    processes = _processes(token)
    return Traces({process: _describe(process) for process in processes}, _ports([psutil.Process(), *processes]))


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
