"""All measurements of one peer, each long enough to be meaningful, with the facts that readers need."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.peers.base import AWAITING_TASKS, LATENCY_COUNT, PIPELINE_COUNT, Latency, Peer, Throughput
from benchmarks.peers.clients import client_module, is_installed
from benchmarks.peers.errors import PeerError, PeerUnavailable

BODY_SIZES = (100, 1_024)
COUNT_MAX = 2_000_000
IDLE_SECONDS = 1.0
"""How long a server runs before its idle memory is read."""

QUIET_SAMPLE_SECONDS = 1.0
QUIET_PERCENT_MAX = 10.0

PROBES_MAX = 4
PROBE_SHARE = 0.3
"""A probe that runs for this share of the target duration measures the rate well enough."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    seconds: float = 3.0
    repeats: int = 3
    latency_count: int = LATENCY_COUNT
    quiet_seconds_max: float = 0.0
    """How long to wait, before each repeat, for the machine to become idle."""
    body_sizes: tuple[int, ...] = BODY_SIZES


@dataclass(slots=True)
class PeerReport:
    """The results of one peer; `skipped` is the reason when there are none."""

    peer: str
    skipped: str = ""
    server_version: str = ""
    client_versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    load_average_before: float = 0.0
    load_average_after: float = 0.0
    idle_resident_size: int | None = None
    throughputs: list[Throughput] = field(default_factory=list)
    latencies: list[Latency] = field(default_factory=list)

    def repeats(self, measurement: str, body_size: int) -> list[Throughput]:
        """The repeats of one throughput measurement, slowest first."""
        chosen = [r for r in self.throughputs if r.measurement == measurement and r.body_size == body_size]
        return sorted(chosen, key=lambda result: result.messages_per_second)

    def latency_repeats(self, body_size: int) -> list[Latency]:
        """The repeats of the latency measurement, lowest p50 first."""
        chosen = [result for result in self.latencies if result.body_size == body_size]
        return sorted(chosen, key=lambda result: result.p50_milliseconds)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run_peer(kind: type[Peer], plan: Plan, progress: Progress) -> PeerReport:
    """Start the peer, run all measurements, end it. The report of a missing or failed peer has the reason."""
    report = PeerReport(peer=kind.name, settings=dict(kind.settings), load_average_before=_load_average())
    progress("starting")
    try:
        with kind() as peer:
            report.server_version = peer.server_version()
            report.client_versions = peer.client_versions()
            time.sleep(IDLE_SECONDS)
            report.idle_resident_size = peer.resident_size()
            for body_size in plan.body_sizes:
                _measure(peer, body_size, plan, report, progress)
    except PeerUnavailable as error:
        report.skipped = str(error)
    except PeerError as error:
        report.skipped = f"failed: {error}"
    report.load_average_after = _load_average()
    return report


def machine_facts() -> dict[str, Any]:
    """The facts about this machine that the figures depend on, without names and addresses."""
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "memory_size": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", platform.system()),
        "python": platform.python_version(),
        "event_loop": "uvloop" if is_installed("uvloop") else "asyncio",
    }


def _load_average() -> float:
    return round(os.getloadavg()[0], 2)


def _measure(peer: Peer, body_size: int, plan: Plan, report: PeerReport, progress: Progress) -> None:
    for name, measure, step in (
        ("pipelined", peer.pipelined, PIPELINE_COUNT),
        ("awaiting_64", peer.awaiting_64, AWAITING_TASKS),
    ):
        progress(f"{name} {body_size} B: finding the count")
        count = _scaled_count(measure, body_size, step, plan.seconds)
        for repeat in range(plan.repeats):
            progress(f"{name} {body_size} B: {count:,} messages, {repeat + 1} of {plan.repeats}")
            _await_quiet(plan.quiet_seconds_max)
            result = measure(body_size, count)
            report.throughputs.append(result)
            progress(f"{name} {body_size} B: {result.messages_per_second:,.0f} messages/s")
    for repeat in range(plan.repeats):
        progress(f"latency {body_size} B: {repeat + 1} of {plan.repeats}")
        _await_quiet(plan.quiet_seconds_max)
        report.latencies.append(peer.latency(body_size, plan.latency_count))


def _await_quiet(seconds_max: float) -> None:
    deadline = time.monotonic() + seconds_max
    while time.monotonic() < deadline:
        if client_module("psutil").cpu_percent(interval=QUIET_SAMPLE_SECONDS) <= QUIET_PERCENT_MAX:
            return


def _scaled_count(measure: Callable[[int, int], Throughput], body_size: int, step: int, seconds: float) -> int:
    """The count, a multiple of `step`, that takes about `seconds`; the probes also warm the server up."""
    count = step
    for _ in range(PROBES_MAX):
        result = measure(body_size, count)
        if result.seconds >= PROBE_SHARE * seconds:
            break
        count = _rounded(min(10 * count, int(count * seconds / result.seconds)), step)
    return _rounded(int(result.messages_per_second * seconds), step)


def _rounded(count: int, step: int) -> int:
    return max(step, min(COUNT_MAX, count) // step * step)
