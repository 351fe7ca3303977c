"""What the meta server takes to give a thousand groups new shares, and what heartbeats wait for meanwhile."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.result import Result
from plait.clock import SystemClock
from plait.meta.database import Database
from plait.meta.service import MetaService
from plait.meta.store import Store
from plait.meta.views import PartitionFacts

#: Rounds, each with other clients that leave; the median counts.
ROUNDS = 5


class Size(NamedTuple):
    """``subjects`` groups of ``members`` each; a client is a member of ``subjects`` / ``classes`` of them."""

    subjects: int
    members: int
    classes: int


def allocation(smoke: bool) -> Iterator[Result]:
    """Of every group one member leaves at the same moment."""
    size = Size(20, 8, 2) if smoke else Size(1_000, 100, 10)
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Database(f"sqlite:///{directory}/meta.db"), cluster="benchmark")
        service = MetaService(store, SystemClock())
        facts = [PartitionFacts(f"s{number}", f"s{number}") for number in range(size.subjects)]
        service.register_broker("g1", "b1", "plait://127.0.0.1:1", partitions=facts)
        classes = [
            [(f"s{number}", "g", True) for number in range(which, size.subjects, size.classes)]
            for which in range(size.classes)
        ]
        for number in range(size.members * size.classes):
            service.beat_client(f"c{number}", classes[number % size.classes])
        while service.step().more:
            pass
        taken, waits = [], np.empty(0)
        for number in range(ROUNDS):
            leaving = range(number * size.classes, (number + 1) * size.classes)
            seconds, waited = _leave(service, classes, list(leaving), size)
            taken.append(seconds)
            waits = np.concatenate([waits, waited])
        store.close()
    details = {"subjects": size.subjects, "members": size.members, "taken": taken, "heartbeats": len(waits)}
    yield Result("new shares for every group", float(np.median(taken)), 1.0, "s", at_most=True, details=details)
    p99 = float(np.percentile(waits, 99)) * 1e3
    yield Result("heartbeats meanwhile, p99", p99, 5.0, "ms", at_most=True, details=details)


def _leave(
    service: MetaService, classes: list[list[tuple[str, str, bool]]], leaving: list[int], size: Size
) -> tuple[float, np.ndarray]:
    """(seconds until all groups have new shares, what heartbeats took that came at the worst moment of a slice)."""
    beating = leaving[-1] + 1
    for client in leaving:
        service.beat_client(f"c{client}", [], leaving=True)
    waits = []
    begin, spent = time.perf_counter(), 0.0
    more, groups = True, 0
    while more:
        came = time.perf_counter()
        changes = service.step()
        more, groups = changes.more, groups + len(changes.groups)
        answered = time.perf_counter()
        client = beating + len(waits) % size.classes
        service.beat_client(f"c{client}", classes[client % size.classes])
        waits.append(time.perf_counter() - came)
        spent += time.perf_counter() - answered
    if groups != size.subjects:
        raise AssertionError(f"{groups} of {size.subjects} groups have new shares")
    return time.perf_counter() - begin - spent, np.array(waits)
