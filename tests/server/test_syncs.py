"""``flush=sync``: quick syncs run on the loop, slow ones beside it."""

from __future__ import annotations

import threading

from plait.clock import ManualClock
from plait.limits import KIB
from plait.testing.disk import Operation, SimulatedDisk
from tests.server.conftest import Serve
from tests.server.raw import Raw


class Watched:
    """A disk on which syncs of the message log take as long as they are told, and where each of them ran."""

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


async def test_a_sync_stays_on_the_loop_only_after_a_quick_one(serve: Serve):
    watched = Watched()
    server = await serve(watched.disk, clock=watched.clock, flush="sync")
    async with Raw(server) as raw:
        await raw.hello()
        await raw.route("orders")
        watched.on_loop.clear()
        for number, seconds in enumerate([0.0, 0.0, 0.5, 0.0, 0.0], 1):
            watched.sync_seconds = seconds
            assert await raw.store("orders", b"%d" % number, first=number, previous=number - 1) == number - 1
        assert watched.on_loop == [True, True, True, False, True], "after the slow one the next is beside the loop"


async def test_a_sync_of_much_is_never_on_the_loop(serve: Serve):
    watched = Watched()
    server = await serve(watched.disk, clock=watched.clock, flush="sync")
    async with Raw(server) as raw:
        await raw.hello()
        await raw.route("orders")
        watched.on_loop.clear()
        for number, size in enumerate([1, 300 * KIB, 1], 1):
            await raw.store("orders", bytes(size), first=number, previous=number - 1)
        assert watched.on_loop == [True, False, True]
