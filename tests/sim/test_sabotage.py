"""The simulated cluster finds defects that a test patches into Plait's code."""

from __future__ import annotations

import pytest

from plait.broker.groups.shared_group import SharedGroup
from plait.storage.producers import FrameVerdict, ProducerTable
from plait.testing.sim import Fault
from plait.testing.simulated_disk import SimulatedDisk
from tests.sim import world_defects as defects
from tests.sim.cluster import Cluster

#: The broker crashes again and again, during its disk operations.
CRASHES = [Fault("crash_at", 0.5 + number / 2, 0.1, "broker", amount=number % 5) for number in range(28)]
KILLS = [Fault("kill", 0.5 + 2 * number, 0.1, "broker") for number in range(6)]
#: The most seeds to try; each finds a defect more often than not.
TRIES = 8


def found(script: list[Fault]) -> str:
    """The error of the first failing seed; "" if none fails."""
    for seed in range(TRIES):
        try:
            Cluster(seed, script=script).run()
        except AssertionError as failure:
            return str(failure)
    return ""


def test_resends_that_are_stored_twice_are_found(monkeypatch: pytest.MonkeyPatch):
    judge = ProducerTable.judge

    def forgetful(self: ProducerTable, *arguments: int) -> FrameVerdict:
        verdict = judge(self, *arguments)
        return FrameVerdict.NEW if verdict is FrameVerdict.DUPLICATE else verdict

    monkeypatch.setattr(ProducerTable, "judge", forgetful)
    assert "stored_twice" in found(CRASHES)


def test_messages_that_stay_with_a_lost_consumer_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SharedGroup, "lost", lambda *_: 0)
    assert "draining is not done" in found([Fault("pause", 12.0, 3.0, "consumer-0")])


def test_a_broker_that_ignores_the_rows_its_consumers_hold_is_found(monkeypatch: pytest.MonkeyPatch):
    reclaim = SharedGroup.reclaim
    monkeypatch.setattr(SharedGroup, "reclaim", lambda self, consumer, holds, *rest: reclaim(self, consumer, [], *rest))
    assert "duplicate" in found(KILLS)


def test_a_close_that_a_cancellation_interrupts_is_found(monkeypatch: pytest.MonkeyPatch):
    defects.interrupt_closing(monkeypatch)
    assert "after it was closed" in found([])


def test_rows_that_are_thrown_away_at_a_clean_stop_are_found(monkeypatch: pytest.MonkeyPatch):
    defects.throw_rows_away_at_a_clean_stop(monkeypatch)
    assert "not delivered at most once" in found([])


def test_a_disk_that_loses_acknowledged_rows_is_found(monkeypatch: pytest.MonkeyPatch):
    """As if a kill lost the page cache."""
    monkeypatch.setattr(SimulatedDisk, "copy", lambda self: self.after_crash(keep="none"))
    assert found(KILLS)
