"""The state of long runs that can be interrupted: which tests and cycles have passed, for which seed and sources.

A run ends by itself within half an hour, and the next run continues where it ended. The state is one JSON file. It is
discarded when everything has passed. It is also discarded when the seed or a source file changes, because earlier
results then prove nothing.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

#: A run begins no cycle after this time. A cycle takes a minute or two.
RUN_SECONDS_MAX = 27 * 60.0


def fingerprint(root: Path, directories: Iterable[str] = ("plait", "tests")) -> str:
    """A hash of the source files below `directories`."""
    digest = hashlib.sha256()
    for directory in directories:
        for path in sorted((root / directory).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


class DeepState:
    """The progress of a long run; every change is saved at once."""

    def __init__(
        self,
        path: Path,
        sources: str,
        seed: int | None = None,
        *,
        seconds: float = RUN_SECONDS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._clock = clock
        self._deadline = clock() + seconds
        saved = _load(path)
        resumes = saved.get("sources") == sources and seed in (None, saved.get("seed"))
        self.sources = sources
        self.seed: int = saved["seed"] if resumes else seed if seed is not None else random.getrandbits(32)
        self.passed: set[str] = set(saved["passed"]) if resumes else set()
        self.cycles: dict[str, int] = dict(saved["cycles"]) if resumes else {}

    @property
    def time_is_up(self) -> bool:
        """True if this run begins no more cycles, because its time is over."""
        return self._clock() > self._deadline

    def finish(self, test: str) -> None:
        """Record that the test passed and need not run again."""
        self.passed.add(test)
        self.cycles.pop(test, None)
        self._save()

    def advance(self, test: str, done: int) -> None:
        """Record that the first `done` cycles of the test have passed."""
        self.cycles[test] = done
        self._save()

    def forget(self, tests: Iterable[str]) -> None:
        """Discard the state of these tests, which have all passed, so that the next run starts from the beginning."""
        for test in tests:
            self.passed.discard(test)
            self.cycles.pop(test, None)
        if self.passed or self.cycles:
            self._save()
        else:
            self._path.unlink(missing_ok=True)

    def _save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "seed": self.seed,
            "sources": self.sources,
            "passed": sorted(self.passed),
            "cycles": self.cycles,
        }
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=1))
        partial.replace(self._path)


class Cycles:
    """The cycles of one long test: ``for number in cycles(50)`` resumes where an interrupted run stopped."""

    def __init__(self, test: str, state: DeepState | None) -> None:
        self._test = test
        self._state = state

    def __call__(self, count: int) -> Iterator[int]:
        """The numbers of the remaining cycles. A cycle counts as passed when the next number is requested."""
        first = self._state.cycles.get(self._test, 0) if self._state else 0
        for number in range(min(first, count), count):
            if self._state and self._state.time_is_up:
                pytest.skip(f"time is up after {number} of {count} cycles; run it again to continue")
            yield number
            if self._state:
                self._state.advance(self._test, number + 1)


def derive(seed: int, test: str) -> int:
    """The seed of one test, derived from the run's seed and the test's name."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{test}".encode()).digest()[:4], "little")


def _load(path: Path) -> dict[str, Any]:
    try:
        saved = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    complete = isinstance(saved, dict) and {"seed", "sources", "passed", "cycles"} <= saved.keys()
    return saved if complete else {}
