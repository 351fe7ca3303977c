"""`python -m benchmarks.compare REVISION`: CPU per message of this Plait and of an earlier commit, interleaved.

Both run the same work as real processes on the same machine, in turns. The figure is the CPU time of client and server
together, which other load disturbs less than elapsed time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.plait_server import PlaitServer
from benchmarks.result import Result, write_json

ROOT = Path(__file__).resolve().parent.parent
WORK = Path(__file__).resolve().parent / "compare_work.py"
#: Workload → messages per round, and whether they have to be stored before.
WORKLOADS = {
    "send_many": (500_000, False),
    "post_keyed": (200_000, False),
    "send_awaiting": (64_000, False),
    "send_alone": (10_000, False),
    "fetch_arrow": (500_000, True),
    "ack_messages": (200_000, True),
}
BAR = 1.03


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """The files of a commit in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="plait-before-") as directory:
        archive = subprocess.run(["git", "archive", revision, "plait"], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", directory], input=archive.stdout, check=True)
        yield Path(directory)


class Side:
    """One version of Plait with its server."""

    def __init__(self, tree: Path, stack: ExitStack) -> None:
        self._environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
        self._server = stack.enter_context(PlaitServer(environment=self._environment))

    def cost(self, work: str, subject: str, count: int) -> float:
        """Microseconds of CPU per message, client and server together."""
        before = self._server.cpu_seconds()
        done = subprocess.run(
            [sys.executable, str(WORK), work, self._server.address, subject, str(count)],
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return (float(done.stdout) + self._server.cpu_seconds() - before) / count * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("revision", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=17)
    parser.add_argument("--share", type=float, default=1.0, help="share of the messages: less is faster and noisier")
    parser.add_argument("--only", choices=WORKLOADS, nargs="+", default=list(WORKLOADS), help="some of the workloads")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    results: list[Result] = []
    with ExitStack() as stack:
        before = stack.enter_context(checkout(arguments.revision))
        now, then = Side(ROOT, stack), Side(before, stack)
        for work in arguments.only:
            full, waiting = WORKLOADS[work]
            count = max(int(full * arguments.share), 64)
            ratios = []
            for number in range(arguments.rounds + 1):
                subject = f"{work}-{number}"
                costs = {}
                for side in (now, then) if number % 2 else (then, now):
                    if waiting:
                        side.cost("send_many", subject, count)
                    costs[side] = side.cost(work, subject, count)
                # The first round runs with cold caches.
                if number:
                    ratios.append(costs[now] / costs[then])
            ratio = statistics.median(ratios)
            details = {"ratios": ratios, "messages": count, "against": arguments.revision}
            results.append(Result(f"CPU a message, {work}, now / before", ratio, BAR, at_most=True, details=details))
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
            print(f"{work:15} {ratio:.3f} ({spread}) {'met' if results[-1].met else 'missed'}", flush=True)
    if arguments.json is not None:
        write_json(arguments.json, results)
    return 0 if all(result.met for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
