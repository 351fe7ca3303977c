"""Tests of the crash explorer: it notices when a broker breaks its promises."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support import broker_defects as defects
from tests.support.broker_explorer import Explorer, Survive, either, kill, power_loss

#: A defect, the flush mode, the kind of crash, and a run in which the explorer notices the defect.
CASES: list[tuple[Callable[[pytest.MonkeyPatch], None], str, Survive, int]] = [
    (defects.finish_before_the_sync, "sync", either, 1),
    (defects.presume_nothing, "async", power_loss, 1),
    (defects.take_a_lost_life_for_a_clean_stop, "async", power_loss, 1),
    (defects.forget_runs, "async", kill, 1),
    (defects.believe_numbers_alone, "async", kill, 1),
    (defects.forget_producers_with_the_process, "sync", either, 1),
    (defects.hand_out_at_once, "sync", either, 1),
    (defects.answer_acks_at_once, "sync", either, 1),
    (defects.forget_events, "async", kill, 1),
    (defects.leave_the_torn_tail, "sync", either, 1),
    (defects.believe_frames_behind_missing_ones, "sync", either, 1),
    (defects.believe_segments_behind_missing_ends, "async", power_loss, 14),
    (defects.sync_nothing, "sync", either, 1),
    (defects.leave_checkpoints_unsynced, "sync", either, 2),
    (defects.leave_segment_names_unsynced, "sync", either, 1),
    (defects.trust_the_page_cache, "sync", either, 1),
    (defects.trust_the_page_cache, "async", kill, 1),
    (defects.define_partitions_once, "async", kill, 1),
]


#: This many runs show every defect.
LIVES = 10


def run_all(lives: list[Explorer]) -> None:
    for explorer in lives:
        explorer.run()


@pytest.mark.parametrize(
    ("defect", "flush", "survive", "life"), CASES, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_explorer_notices(
    defect: Callable[[pytest.MonkeyPatch], None],
    flush: str,
    survive: Survive,
    life: int,
    monkeypatch: pytest.MonkeyPatch,
):
    defect(monkeypatch)
    all_written = not (flush == "async" and survive is power_loss)
    # The crash points of a run depend on the size of all frames, so not every run reaches the defect.
    lives = [Explorer(each, flush, survive, all_written=all_written, every=5) for each in range(life, life + LIVES)]
    with pytest.raises(AssertionError) as raised:
        run_all(lives)
    assert any("crash point" in note for note in raised.value.__notes__)


def test_crash_points_are_reproducible():
    first, second = (Explorer(5, "sync", either, operations=25, every=4) for _ in range(2))
    for explorer in (first, second):
        explorer.run()
    assert (first.points, first.trace.performed) == (second.points, second.trace.performed)
    third = Explorer(6, "sync", either, operations=25, every=10, first=3)
    third.run()
    assert third.crashes == len(range(3, third.points, 10))
