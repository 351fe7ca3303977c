"""The peers' figures as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from rich.table import Table

from benchmarks.peers.base import Latency, Throughput
from benchmarks.peers.suite import PeerReport, machine_facts

MIB = 1_048_576
Result = TypeVar("Result", Throughput, Latency)


def table_of(reports: Sequence[PeerReport], body_sizes: Sequence[int]) -> Table:
    """One row for each peer and body size: the median repeat, with the range of all of them."""
    table = Table(title="Peers: one producer, one consumer, median of the repeats (lowest–highest)")
    for heading in (
        "peer",
        "body",
        "pipelined/s",
        "server µs",
        "producer µs",
        "consumer µs",
        "64 awaiting/s",
        "p50 ms",
        "p99 ms",
        "others' CPU",
        "idle RSS",
    ):
        table.add_column(heading, justify="left" if heading == "peer" else "right")
    for report in reports:
        if report.skipped:
            table.add_row(report.peer, "", "skipped")
            continue
        for body_size in body_sizes:
            pipelined = report.repeats("pipelined", body_size)
            awaiting = report.repeats("awaiting_64", body_size)
            latencies = report.latency_repeats(body_size)
            table.add_row(
                report.peer,
                f"{body_size} B",
                _rates(pipelined),
                *_cpu_cells(pipelined),
                _rates(awaiting),
                *_latency_cells(latencies),
                _others([*pipelined, *awaiting, *latencies]),
                "" if report.idle_resident_size is None else f"{report.idle_resident_size / MIB:,.0f} MiB",
            )
    return table


def write_json(reports: Sequence[PeerReport], path: Path) -> list[Path]:
    """Write all reports into the file `path`, or one file for each peer when it is a directory."""
    if not path.is_dir():
        _write(path, reports)
        return [path]
    written = []
    for report in reports:
        if report.skipped:
            continue
        target = path / f"{report.peer}.json"
        _write(target, [report])
        written.append(target)
    return written


def _write(path: Path, reports: Sequence[PeerReport]) -> None:
    document = {"machine": machine_facts(), "peers": [report.as_json() for report in reports]}
    path.write_text(json.dumps(document, indent=2) + "\n")


def _rates(repeats: Sequence[Throughput]) -> str:
    if not repeats:
        return ""
    middle, lowest, highest = (r.messages_per_second for r in (_median(repeats), repeats[0], repeats[-1]))
    return f"{middle:,.0f}\n({lowest:,.0f}–{highest:,.0f})"


def _cpu_cells(repeats: Sequence[Throughput]) -> list[str]:
    if not repeats:
        return [""] * 3
    result = _median(repeats)
    return [
        "" if seconds is None else f"{seconds * 1e6:,.1f}"
        for seconds in (
            result.server_cpu_seconds_per_message,
            result.producer_cpu_seconds_per_message,
            result.consumer_cpu_seconds_per_message,
        )
    ]


def _latency_cells(repeats: Sequence[Latency]) -> list[str]:
    if not repeats:
        return ["", ""]
    result = _median(repeats)
    return [f"{result.p50_milliseconds:.2f}", f"{result.p99_milliseconds:.2f}"]


def _others(results: Sequence[Throughput | Latency]) -> str:
    shares = [result.other_cpu_share for result in results if result.other_cpu_share is not None]
    return f"{min(shares):.0%}–{max(shares):.0%}" if shares else ""


def _median(repeats: Sequence[Result]) -> Result:
    return repeats[(len(repeats) - 1) // 2]
