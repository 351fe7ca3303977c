"""A slice of a frame has exactly the selected rows, unchanged."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import FrameError
from plait.frame import FrameView, build_frame, slice_mask, slice_rows
from plait.frame.arrow import record_batch
from plait.frame.columns import ORIGINAL_SIZE_MAX, Codec, Column
from plait.frame.header import HEADER_SIZE
from plait.frame.run_tables import RUN, expand_runs, runs_of_rows
from plait.frame.slicing import SPANS_MAX, keep_mask, read_note
from plait.limits import FRAME_SIZE_MAX
from tests.frame.samples import NOW, Draft, drafts, full_draft, relaxed, rows_of, with_column


def ranges(count: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, count - 1), st.integers(1, count)).filter(lambda r: r[0] < r[1])


def masks(count: int) -> st.SearchStrategy[list[bool]]:
    return st.lists(st.booleans(), min_size=count, max_size=count).filter(any)


@relaxed
@given(st.data(), drafts())
def test_a_row_range_has_the_rows_of_the_range(data: st.DataObject, draft: Draft):
    start, stop = data.draw(ranges(draft.count))
    sliced = FrameView(slice_rows(draft.view(), start, stop).tobytes()).validate()
    assert rows_of(sliced) == draft.rows()[start:stop]
    assert (sliced.partition, sliced.store_time, sliced.durable, sliced.epoch) == (3, NOW, 4096, 2)
    assert sliced.flags == draft.flags


@relaxed
@given(st.data(), drafts())
def test_a_mask_selects_its_rows(data: st.DataObject, draft: Draft):
    mask = data.draw(masks(draft.count))
    sliced = FrameView(slice_mask(draft.view(), np.array(mask)).tobytes()).validate()
    assert rows_of(sliced) == [row for row, chosen in zip(draft.rows(), mask, strict=True) if chosen]
    assert sliced.end == draft.base + draft.count
    assert (sliced.partition, sliced.store_time, sliced.durable, sliced.epoch) == (3, NOW, 4096, 2)


@relaxed
@given(st.data(), drafts(compressed=False))
def test_a_slice_of_a_slice_is_a_slice(data: st.DataObject, draft: Draft):
    start, stop = data.draw(ranges(draft.count))
    once = FrameView(slice_rows(draft.view(), start, stop).tobytes())
    if data.draw(st.booleans()):
        a, b = data.draw(ranges(once.count))
        twice = FrameView(slice_rows(once, a, b).tobytes()).validate()
        assert rows_of(twice) == draft.rows()[start + a : start + b]
    else:
        mask = data.draw(masks(once.count))
        masked = FrameView(slice_mask(once, np.array(mask)).tobytes()).validate()
        assert rows_of(masked) == [r for r, m in zip(draft.rows()[start:stop], mask, strict=True) if m]


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("step", [2, 3, 100])
def test_masks_with_many_and_few_spans_give_the_right_rows(step: int, compression: str | None):
    draft = full_draft(40 * SPANS_MAX, compression)
    mask = np.zeros(draft.count, bool)
    mask[::step] = True
    parts = slice_mask(draft.view(), mask)
    assert rows_of(FrameView(parts.tobytes()).validate()) == draft.rows()[::step]
    assert len(parts.parts) < 10 * SPANS_MAX


def test_raw_columns_are_cut_and_not_copied():
    source = bytearray(full_draft(100).build().tobytes())
    parts = slice_rows(FrameView(source), 10, 60).parts
    inside = sum(len(part) for part in parts if isinstance(part, memoryview) and part.obj is source)
    assert inside > 0.8 * sum(map(len, parts))


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_slice_has_the_whole_compressed_column(compression: str):
    frame = full_draft(100, compression).view()
    for parts in (slice_rows(frame, 3, 5), slice_mask(frame, np.arange(100) % 9 == 0)):
        sliced = FrameView(parts.tobytes())
        assert sliced.stored(Column.BODY) == frame.stored(Column.BODY)
        assert sliced.stored(Column.KEY) != frame.stored(Column.KEY)


def test_a_constant_column_stays_constant():
    frame = Draft([b"a", b"b", b"c"], send_time=NOW).view()
    for parts in (slice_rows(frame, 1, 2), slice_mask(frame, np.array([True, False, True]))):
        assert FrameView(parts.tobytes()).places[Column.SEND_TIME][0] == Codec.CONST


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (2, 2), (3, 2), (-1, 2), (0, 6), (5, 6)])
def test_ranges_outside_the_frame_are_refused(start: int, stop: int):
    with pytest.raises(FrameError, match="outside a frame of 5"):
        slice_rows(full_draft(5).view(), start, stop)


@pytest.mark.parametrize("mask", [[False] * 5, [True] * 4, [True] * 6])
def test_masks_that_do_not_fit_are_refused(mask: list[bool]):
    with pytest.raises(FrameError, match=r"at least one row|does not fit"):
        slice_mask(full_draft(5).view(), np.array(mask))


def test_masks_of_numbers_select_the_nonzero_rows():
    frame = full_draft(5).view()
    numbers = slice_mask(frame, np.array([0, 2, 1, 0, 7]))
    truths = slice_mask(frame, np.array([False, True, True, False, True]))
    assert numbers.tobytes() == truths.tobytes()


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("chosen", [[0], [1, 2], [0, 2], [0, 1, 2]])
def test_rows_of_a_selection_can_be_selected_again(compression: str | None, chosen: list[int]):
    whole = full_draft(5, compression).view()
    once = np.array([True, False] * 2 + [True])
    masked = FrameView(slice_mask(whole, once).tobytes())
    again = np.isin(np.arange(3), chosen)
    direct = np.zeros(5, bool)
    direct[np.flatnonzero(once)[chosen]] = True
    assert slice_mask(masked, again).tobytes() == slice_mask(whole, direct).tobytes()


def test_a_row_range_of_a_selection_is_refused():
    masked = FrameView(slice_mask(full_draft(5).view(), np.array([True, False] * 2 + [True])).tobytes())
    with pytest.raises(FrameError, match="select rows by a mask"):
        slice_rows(masked, 0, 1)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_retained_rows_do_not_contain_data_of_the_other_rows(compression: str | None):
    whole = full_draft(50, compression).view()
    mask = np.isin(np.arange(50), [3, 30, 31])
    kept = FrameView(keep_mask(whole, mask, b"why").tobytes()).validate()
    sliced = FrameView(slice_mask(whole, mask).tobytes())
    assert read_note(kept) == b"why"
    assert kept.compressed == (compression is not None), "a column that is smaller compressed stays compressed"
    assert kept.sequences().tolist() == sliced.sequences().tolist()
    assert [ids.tolist() for ids in kept.message_ids()] == [ids.tolist() for ids in sliced.message_ids()]
    assert record_batch(kept) == record_batch(sliced)
    assert not FrameView(slice_mask(kept, np.array([True, False, True])).tobytes()).has(Column.NOTE)


@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=30), data=st.data())
def test_a_shortened_run_table_has_the_same_ids_for_its_rows(counts: list[int], data: st.DataObject):
    total = sum(counts)
    table = np.array([(10 + i, 100 * i + 1, count, 5, 7) for i, count in enumerate(counts)], RUN)
    rows = np.array(sorted(data.draw(st.sets(st.integers(0, total - 1), min_size=1))))
    short = runs_of_rows(table, rows)
    assert int(short["rows"].sum()) == total
    assert len(short) <= min(len(table), 2 * len(rows) + 1)
    for full, brief in zip(expand_runs(table), expand_runs(short), strict=True):
        assert full[rows].tolist() == brief[rows].tolist()


@pytest.mark.parametrize("position", [HEADER_SIZE - 30, 20, HEADER_SIZE + 2, -1])
def test_a_damaged_frame_is_not_sliced(position: int):
    rotten = bytearray(full_draft(50).build().tobytes())
    rotten[position] ^= 1
    with pytest.raises(FrameError):
        slice_rows(FrameView(rotten), 3, 5)
    with pytest.raises(FrameError):
        slice_mask(FrameView(rotten), np.arange(50) == 3)


def test_columns_of_a_newer_version_are_left_out_of_slices():
    for codec in range(16):
        newer = FrameView(with_column(full_draft(6).build(), 30, codec, b"whatever").tobytes())
        for parts in (slice_rows(newer, 1, 4), slice_mask(newer, np.arange(6) % 2 == 0)):
            sliced = FrameView(parts.tobytes()).validate()
            assert not sliced.has(30)


CUTS = (lambda frame: slice_rows(frame, 1, 3), lambda frame: slice_mask(frame, np.arange(6) % 2 == 0))


@pytest.mark.parametrize("column", [Column.KEY_HASH, Column.SEND_TIME, Column.PRIORITY, Column.KEY, Column.BODY])
@pytest.mark.parametrize("codec", [1, 2, 3, 4, 9, 15])
def test_a_column_with_a_wrong_codec_is_not_sliced(column: Column, codec: int):
    frame = full_draft(6).build()
    data = bytes(FrameView(frame.tobytes()).stored(column))
    lying = FrameView(with_column(frame, column, codec, data).tobytes())
    for cut in CUTS:
        if column == Column.BODY and codec in (Codec.ZSTD, Codec.LZ4):
            # Slicing does not inflate a compressed body: its reader detects the damage.
            sliced = FrameView(cut(lying).tobytes())
            with pytest.raises(FrameError):
                sliced.validate()
        else:
            with pytest.raises(FrameError, match="rows cannot be found"):
                cut(lying)


def test_offsets_that_point_before_their_data_are_not_sliced():
    data = struct.pack("<7i", 4, 0, 4, 4, 4, 4, 8) + b"abcd"
    lying = FrameView(with_column(full_draft(6).build(), Column.BODY, Codec.RAW, data).tobytes())
    for cut in CUTS:
        with pytest.raises(FrameError, match="offsets that do not fit"):
            cut(lying)


@pytest.mark.parametrize("size", [0, 4, 8, 24, 32, 40])
@pytest.mark.parametrize("column", [Column.BODY, Column.KEY, Column.KEY_HASH, Column.PRIORITY])
def test_columns_of_the_wrong_size_are_not_sliced(column: Column, size: int):
    data = struct.pack("<i", 7) * (size // 4)
    lying = FrameView(with_column(full_draft(6).build(), column, Codec.RAW, data).tobytes())
    with pytest.raises(FrameError):
        slice_rows(lying, 1, 3)
    with pytest.raises(FrameError):
        slice_mask(lying, np.arange(6) % 2 == 0)


def test_a_slice_with_the_highest_sequences_reads_back():
    end = 1 << 62
    draft = Draft([b"a", b"b", b"c"], first=end - 3, base=end - 3)
    assert rows_of(FrameView(slice_rows(draft.view(), 1, 3).tobytes())) == draft.rows()[1:]


def test_the_largest_frame_of_a_producer_can_be_sliced():
    count = 1 << 20
    body = np.random.default_rng(1).bytes(ORIGINAL_SIZE_MAX - HEADER_SIZE - 8 - 4 * (count + 1) - 4)
    largest = FrameView(build_frame([b""] * (count - 1) + [body], producer=1, first=1).tobytes()).validate()
    assert largest.size == ORIGINAL_SIZE_MAX
    mask = np.ones(count, bool)
    mask[1] = False
    sliced = FrameView(slice_mask(largest, mask).tobytes()).validate()
    assert ORIGINAL_SIZE_MAX < sliced.size <= FRAME_SIZE_MAX
    assert sliced.count == count - 1


def test_a_frame_of_a_producer_without_room_for_a_selection_is_not_valid():
    frame = build_frame([b"\0" * (1 << 20)], producer=1, first=1)
    longer = with_column(frame, 20, Codec.RAW, b"\0" * (FRAME_SIZE_MAX - frame.size - 16))
    assert ORIGINAL_SIZE_MAX < longer.size <= FRAME_SIZE_MAX
    with pytest.raises(FrameError, match="no room to slice it"):
        FrameView(longer.tobytes()).validate()
