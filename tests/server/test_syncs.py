"""``flush=sync``: fast syncs run on the loop, slow ones in a thread."""

from __future__ import annotations

import threading

import pytest

from plait.clock import ManualClock
from plait.limits import KIB
from plait.testing.simulated_disk import Operation, SimulatedDisk
from tests.server.conftest import Serve
from tests.server.raw import Raw


class Watched:
    """A disk whose syncs of the message log take ``sync_seconds``; records whether each ran on the loop."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        self.clock = ManualClock()
        self.sync_seconds = 0.0
        self.on_loop: list[bool] = []
        self._thread = threading.get_ident()
        self.disk.on_operation = self._on_operation

    def _on_operation(self, operation: Operation, path: str, size: int) -> None:
        if operation == "sync" and path.startswith("message/"):
            self.on_loop.append(threading.get_ident() == self._thread)
            self.clock.advance(self.sync_seconds)


@pytest.mark.parametrize(
    ("sends", "on_loop"),
    [
        # The sync after a slow one runs in a thread.
        ([(1, 0.0), (1, 0.0), (1, 0.5), (1, 0.0), (1, 0.0)], [True, True, True, False, True]),
        # A large sync runs in a thread.
        ([(1, 0.0), (300 * KIB, 0.0), (1, 0.0)], [True, False, True]),
    ],
    ids=["slow", "large"],
)
async def test_a_sync_runs_on_the_loop_only_if_it_is_small_and_the_last_one_was_fast(
    serve: Serve, sends: list[tuple[int, float]], on_loop: list[bool]
):
    watched = Watched()
    server = await serve(watched.disk, clock=watched.clock, flush="sync")
    async with Raw(server, "raw") as raw:
        await raw.route("orders")
        watched.on_loop.clear()
        for number, (size, watched.sync_seconds) in enumerate(sends, 1):
            assert await raw.store("orders", bytes(size), first=number, previous=number - 1) == number - 1
    assert watched.on_loop[: len(sends)] == on_loop
