"""Idempotent sends: new frames, duplicates and gaps (R7), and forgetting producers (R9)."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.storage.producers import SHARDS, FrameVerdict, ProducerTable

P, PARTITION = 0xABC, 4
DAY = 86_400_000_000


def table(
    producers_max: int = 100, window_frames: int = 4, keep_seconds: float = 7 * 86400.0, windows_max: int = 100
) -> ProducerTable:
    return ProducerTable(
        producers_max=producers_max, window_frames=window_frames, keep_seconds=keep_seconds, windows_max=windows_max
    )


def store(
    known: ProducerTable, first: int, count: int, previous: int, base: int = 0, *, producer: int = P, time: int = 0
) -> None:
    known.stored(producer, PARTITION, first, count, previous, base, time, 0xC0FFEE + first)


def receipt(known: ProducerTable, first: int, count: int = 1) -> int | None:
    run = known.find(P, PARTITION, first, count)
    return None if run is None else run.base


def judge(known: ProducerTable, first: int, count: int, previous: int) -> FrameVerdict:
    return known.judge(P, PARTITION, first, count, previous)


# --- R7 -----------------------------------------------------------------------------------------


def test_r7_only_the_exact_successor_is_stored():
    known = table()
    assert judge(known, 1, 3, 0) is FrameVerdict.NEW
    store(known, 1, 3, 0)
    assert judge(known, 4, 2, 3) is FrameVerdict.NEW
    assert judge(known, 6, 1, 5) is FrameVerdict.GAP
    assert judge(known, 4, 2, 2) is FrameVerdict.GAP
    # 4 to 8 went to other partitions: producer sequences count over all partitions, ``previous`` within one.
    assert judge(known, 9, 1, 3) is FrameVerdict.NEW


def test_r7_a_refused_frame_is_never_overtaken_and_then_dropped_as_a_duplicate():
    known = table()
    store(known, 1, 3, 0)
    # [4, 6] was refused; [7, 9] names it as predecessor.
    assert judge(known, 7, 3, 6) is FrameVerdict.GAP
    # The client gives up [4, 6] and sends [7, 9] as successor of 3.
    assert judge(known, 7, 3, 3) is FrameVerdict.NEW
    store(known, 7, 3, 3)
    # The client sends [4, 6] again: it was never stored, so it must not count as a duplicate.
    assert judge(known, 4, 3, 3) is FrameVerdict.GAP


def test_a_resend_cut_into_other_frames_is_a_duplicate_without_a_receipt():
    known = table()
    store(known, 1, 3, 0, base=100)
    store(known, 4, 2, 3, base=250)
    assert judge(known, 1, 5, 0) is FrameVerdict.DUPLICATE
    assert receipt(known, 1, 5) is None
    assert judge(known, 4, 3, 3) is FrameVerdict.GAP, "6 was never stored"


def test_a_resend_from_before_the_window_is_a_duplicate_without_a_receipt():
    known = table(window_frames=2)
    for number in range(1, 6):
        store(known, number, 1, number - 1, base=number * 10)
    assert judge(known, 1, 1, 0) is FrameVerdict.DUPLICATE
    assert receipt(known, 1) is None
    assert receipt(known, 4) == 40


# --- holes --------------------------------------------------------------------------------------


def with_hole() -> ProducerTable:
    """Sequences 1 to 2 and 7 to 8 are stored; 3 to 6 were lost to damage."""
    known = table()
    store(known, 1, 2, 0)
    store(known, 7, 2, 6)
    return known


def test_a_resend_of_rows_lost_to_damage_is_new():
    known = with_hole()
    assert judge(known, 3, 2, 2) is FrameVerdict.NEW
    store(known, 3, 2, 2, base=50)
    assert judge(known, 3, 2, 2) is FrameVerdict.DUPLICATE
    assert receipt(known, 3, 2) == 50
    assert judge(known, 5, 2, 4) is FrameVerdict.NEW
    store(known, 5, 2, 4)
    assert judge(known, 5, 2, 4) is FrameVerdict.DUPLICATE
    assert judge(known, 9, 1, 8) is FrameVerdict.NEW
    window = known.window(P, PARTITION)
    assert window is not None
    assert window.holes == []


def test_a_hole_is_filled_in_order_and_not_beyond_its_end():
    known = with_hole()
    assert judge(known, 5, 2, 4) is FrameVerdict.GAP
    assert judge(known, 3, 6, 2) is FrameVerdict.GAP
    assert judge(known, 7, 2, 6) is FrameVerdict.DUPLICATE


# --- R9 -----------------------------------------------------------------------------------------


def test_r9_an_unknown_producer_in_the_middle_of_its_sequence_gets_a_distinct_verdict():
    assert judge(table(), 5, 1, 4) is FrameVerdict.UNKNOWN


def test_r9_producers_are_forgotten_after_a_time_of_silence():
    known = table(keep_seconds=7 * 86400)
    store(known, 1, 1, 0, time=0)
    store(known, 1, 1, 0, producer=2, time=DAY)
    assert known.forget(7 * DAY - 1) == []
    assert known.forget(7 * DAY) == [P]
    assert judge(known, 2, 1, 1) is FrameVerdict.UNKNOWN
    assert known.judge(2, PARTITION, 2, 1, 1) is FrameVerdict.NEW


def test_r9_the_longest_silent_producer_is_forgotten_first_when_there_are_too_many():
    known = table(producers_max=2)
    for producer in (1, 2, 3):
        store(known, 1, 1, 0, producer=producer, time=producer)
    store(known, 2, 1, 1, producer=1, time=4)
    assert known.forget(10) == [2]
    assert len(known) == 2
    assert set(known.ids()) == {1, 3}


def test_r9_the_longest_silent_producer_is_forgotten_first_when_there_are_too_many_windows():
    known = table(windows_max=10)
    for producer, partitions in ((1, 4), (2, 3), (3, 3)):
        for partition in range(partitions):
            known.stored(producer, partition, 1, 1, 0, 0, producer, 0)
    assert known.forget(10) == []
    store(known, 1, 1, 0, producer=1, time=4)
    assert known.window_count == 11
    assert known.forget(10) == [2], "producer 1 has sent since"
    assert known.window_count == 8
    assert known.judge(2, 0, 2, 1, 1) is FrameVerdict.UNKNOWN
    assert known.judge(1, 3, 2, 1, 1) is FrameVerdict.NEW


def test_r9_the_order_of_last_use_survives_a_checkpoint():
    known = table(producers_max=2)
    for producer, time in ((5, 30), (6, 10), (7, 20)):
        store(known, 1, 1, 0, producer=producer, time=time)
    again = table(producers_max=2)
    for producer in (7, 5, 6):
        again.load(saved(known, producer))
    again.order()
    assert again.forget(40) == [6]


def test_a_deleted_partition_is_forgotten():
    known = table()
    store(known, 1, 1, 0)
    known.dirty.clear()
    known.forget_partition(PARTITION)
    assert known.window(P, PARTITION) is None
    assert known.dirty == {P % SHARDS}


# --- checkpoint ---------------------------------------------------------------------------------


def saved(known: ProducerTable, *producers: int) -> Any:
    """The dump of some producers, encoded and decoded like a checkpoint."""
    entry = tuple[int, int, list[tuple[int, int, list[list[int]], list[list[int]]]]]
    return msgspec.msgpack.decode(msgspec.msgpack.encode(known.dump(producers)), type=list[entry])


def test_new_producers_do_not_displace_proven_ones():
    known = table(producers_max=100)
    for number in range(1, 51):
        for minute in (0, 1):
            store(known, 1 + minute, 1, minute, producer=number, time=minute * 60_000_000)
    for number in range(1000, 3000):
        store(known, 1, 1, 0, producer=number, time=120_000_000)
        known.forget(120_000_000)
    assert len(known) == 100
    assert all(known.window(number, PARTITION) is not None for number in range(1, 51))
    # The last of the new producers are left, and those that are proven now count like the others.
    assert known.window(2999, PARTITION) is not None
    assert known.window(1000, PARTITION) is None
    assert known.forget(120_000_000 + 8 * DAY) != []
    assert len(known) == 0


def test_a_full_window_takes_little_more_than_its_numbers():
    """The table is bounded by the number of windows, so each window must be small."""
    windows, frames = 100, 64
    tracemalloc.start()
    try:
        known = table(window_frames=frames)
        for partition in range(windows):
            for number in range(1, 3 * frames):
                known.stored(P, partition, 10**12 + number, 1, 0, 10**13 + number, 0, 0)
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert size / windows < 2 * 4 * 8 * frames


FRAMES = st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()), min_size=1, max_size=20)


@given(FRAMES, st.integers(0, 20))
@settings(max_examples=200, deadline=None)
def test_a_client_that_resends_until_it_gets_a_receipt_stores_every_row_once_and_in_order(
    frames: list[tuple[int, bool, bool]], checkpoint_after: int
):
    """Each frame: (rows, the receipt is lost, rows go to another partition). A checkpoint is made at some point."""
    known = table(window_frames=64)
    stored: list[int] = []
    number, previous = 1, 0
    for index, (count, answer_lost, elsewhere) in enumerate(frames):
        if elsewhere:
            number += 2
        for attempt in range(2 if answer_lost else 1):
            verdict = judge(known, number, count, previous)
            assert verdict is (FrameVerdict.NEW if attempt == 0 else FrameVerdict.DUPLICATE)
            if verdict is FrameVerdict.NEW:
                store(known, number, count, previous, base=len(stored))
                stored += range(number, number + count)
            assert stored[receipt(known, number, count) or 0] == number
        previous = number + count - 1
        number += count
        if index == checkpoint_after:
            again = table(window_frames=64)
            again.load(saved(known, P))
            again.order()
            known = again
    assert stored == sorted(set(stored))
