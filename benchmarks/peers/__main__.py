"""Run the peers: `python -m benchmarks.peers [names] [--json PATH]`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.peers import kafka, rocketmq
from benchmarks.peers.registry import PEERS
from benchmarks.peers.report import table_of, write_json
from benchmarks.peers.suite import PeerReport, Plan, run_peer

TERMINATED_STATUS = 128 + signal.SIGTERM


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the named peers, or all; returns 0 unless every one of them was skipped."""
    options = _parser().parse_args(arguments)
    unknown = [name for name in options.names if name not in PEERS]
    if unknown:
        print(f"no peer named {', '.join(unknown)}; there are {', '.join(PEERS)}", file=sys.stderr)
        return 2
    for variable, address in (
        (kafka.ADDRESS_VARIABLE, options.kafka),
        (rocketmq.ADDRESS_VARIABLE, options.rocketmq),
        (rocketmq.NAMESERVER_VARIABLE, options.rocketmq_nameserver),
    ):
        if address:
            os.environ[variable] = address
    # SIGTERM unwinds like an interrupt, so that no server outlives the benchmark.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED_STATUS))
    plan = Plan(options.seconds, options.repeats, quiet_seconds_max=options.quiet)
    console = Console()
    reports = []
    for name in options.names or PEERS:
        reports.append(_run_one(name, plan, console))
        # After every peer, so that an interrupted run keeps the results so far.
        if options.json is not None:
            write_json(reports, options.json)
    console.print(table_of(reports, plan.body_sizes))
    return 1 if all(report.skipped for report in reports) else 0


def _run_one(name: str, plan: Plan, console: Console) -> PeerReport:
    with console.status(f"{name}: starting") as status:

        def progress(text: str) -> None:
            status.update(f"{name}: {text}")
            if text.endswith("/s"):
                console.print(f"{name}: {text}")

        report = run_peer(PEERS[name], plan, progress)
    if report.skipped:
        console.print(f"{name} skipped: {report.skipped}", markup=False)
    return report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"any of {', '.join(PEERS)}; default: all")
    parser.add_argument("--json", type=Path, metavar="PATH", help="a file, or a directory: one file per peer")
    parser.add_argument("--seconds", type=float, default=3.0, help="target duration of one measurement")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each measurement")
    parser.add_argument("--quiet", type=float, default=0.0, metavar="SECONDS", help="wait for an idle machine")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="measure a Kafka that already runs")
    parser.add_argument("--rocketmq", metavar="HOST:PORT", help="measure a RocketMQ proxy that already runs")
    parser.add_argument("--rocketmq-nameserver", metavar="HOST:PORT", help="the name server of that proxy")
    return parser


if __name__ == "__main__":
    sys.exit(main())
