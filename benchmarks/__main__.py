"""`python -m benchmarks`: every bar of the core, measured in one run, as a table, JSON and a plot."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import (
    filters,
    headers,
    meta,
    ordered,
    ordered_handover,
    partitions,
    priority,
    query,
    retry,
    schedule,
    throughput,
    turns,
)
from benchmarks import scale as scale_suite
from benchmarks.plot import plot
from benchmarks.result import Result, write_json

RESULTS = Path(__file__).parent / "results"

Suite = Callable[[bool], Iterator[Result]]

SUITES: dict[str, Suite] = {
    "batches": lambda smoke: throughput.batch_paths(_scale(smoke)),
    "redis": lambda smoke: throughput.against_redis(_scale(smoke)),
    "sync": lambda smoke: throughput.sync_flush(_scale(smoke)),
    "latency": lambda smoke: throughput.latency(_scale(smoke)),
    "headers": headers.header_forms,
    "filters": filters.scans,
    "query": query.by_key,
    "priority": priority.bars,
    "backlog": scale_suite.backlog,
    "subjects": scale_suite.many_subjects,
    "turns": turns.longest_turn,
    "restart": scale_suite.restart,
    "idle": scale_suite.idle_consumers,
    "storm": retry.storm,
    "dead": retry.dead_letters,
    "lateness": schedule.lateness,
    "scheduled": schedule.ten_million,
    "allocation": meta.allocation,
    "ordered": ordered.throughput,
    "owners": ordered.scaling,
    "partitions": partitions.consuming,
    "handover": ordered_handover.handover,
    "spark": lambda smoke: _spark(smoke),
    "archive": lambda smoke: _archive(smoke),
    "history": lambda smoke: _history(smoke),
    "sink": lambda smoke: _sink(smoke),
    "audit": lambda smoke: _audit(smoke),
}


def _spark(smoke: bool) -> Iterator[Result]:
    # Spark has to be installed for this suite only.
    from benchmarks import spark_scan

    return spark_scan.results(smoke)


def _history(smoke: bool) -> Iterator[Result]:
    from benchmarks import spark_history

    return spark_history.results(smoke)


def _archive(smoke: bool) -> Iterator[Result]:
    from benchmarks import spark_archive

    return spark_archive.results(smoke)


def _sink(smoke: bool) -> Iterator[Result]:
    from benchmarks import spark_sink

    return spark_sink.results(smoke)


def _audit(smoke: bool) -> Iterator[Result]:
    from benchmarks import spark_audit

    return spark_audit.results(smoke)


def _scale(smoke: bool) -> throughput.Scale:
    return throughput.SMOKE if smoke else throughput.Scale()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", help=f"any of {', '.join(SUITES)}; default: all")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: shows that they run, measures nothing")
    parser.add_argument("--json", type=Path, default=RESULTS / "core.json")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.suites if name not in SUITES]
    if unknown:
        parser.error(f"no such suite: {', '.join(unknown)}; there are {', '.join(SUITES)}")
    console = Console()
    results: list[Result] = []
    for name in arguments.suites or SUITES:
        console.print(f"[bold]{name}[/] …")
        for result in SUITES[name](arguments.smoke):
            results.append(result)
            mark = "[green]met[/]" if result.met else "[red]missed[/]"
            console.print(f"  {result.name}: {result.figure:.3g} {result.unit} (bar {result.bar:g}) {mark}")
    console.print(_table(results))
    if not arguments.smoke:
        write_json(arguments.json, results)
        plot(results, arguments.json.with_suffix(".png"))
        return 0 if all(result.met for result in results) else 1
    return 0


def _table(results: list[Result]) -> Table:
    table = Table(title="Plait against its bars")
    for column in ("what", "figure", "bar", ""):
        table.add_column(column)
    for result in results:
        side = "≤" if result.at_most else "≥"
        mark = "[green]met[/]" if result.met else "[red]missed[/]"
        table.add_row(result.name, f"{result.figure:.3g} {result.unit}", f"{side} {result.bar:g}", mark)
    return table


if __name__ == "__main__":
    sys.exit(main())
