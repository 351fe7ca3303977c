"""Outcomes of table rows by number or mask: all rows are checked before any outcome is reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import plait
from plait.client.consume.row_runs import row_mask
from tests.client.support import send


@pytest.mark.parametrize(
    "rows",
    [
        [1, 2],
        (2, 1, 1),
        {1, 2},
        range(1, 3),
        iter([1, 2]),
        np.array([1, 2]),
        np.array([1, 2], np.uint8),
        np.array([2, 1], np.uint64),
        pa.array([1, 2]),
        pa.array([1, 2], pa.uint16()),
        pa.chunked_array([pa.array([1]), pa.array([2])]),
        [False, True, True],
        np.array([False, True, True]),
        pa.array([False, True, True]),
        pa.chunked_array([pa.array([False]), pa.array([True, True])]),
    ],
)
def test_rows_are_given_by_number_or_mask_in_several_forms(rows: Any):
    assert row_mask(rows, 3).tolist() == [False, True, True]


@pytest.mark.parametrize("none", [[], (), np.array([]), np.array([], bool), pa.array([], pa.int64()), iter(())])
def test_empty_selections_select_no_row(none: Any):
    assert row_mask(none, 3).tolist() == [False] * 3


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([0, 7], "row 7 is out of range for a batch of 3 rows"),
        ([-1], "row -1 is out of range for a batch of 3 rows"),
        (np.array([1 << 63], np.uint64), "row 9223372036854775808 is out of range"),
        ([True, False], "the row mask has 2 values, the batch has 3 rows"),
        (pa.array([True] * 4), "the row mask has 4 values"),
        ([1.0], "rows .* are not valid; use row numbers"),
        (np.array([1.5]), "are not valid"),
        (pa.array([1, None]), "are not valid"),
        (pa.array([True, None, True]), "are not valid"),
        (np.array([[0, 1]]), "are not valid"),
        (np.array(1), "are not valid"),
        ([[0], [1, 2]], "are not valid"),
        ([2**70], "are not valid"),
        (["0"], "are not valid"),
        ("01", "are not valid"),
        (1, "are not valid"),
        (True, "are not valid"),
    ],
)
def test_invalid_rows_are_refused(rows: Any, reason: str):
    with pytest.raises(plait.InvalidArgument, match=reason):
        row_mask(rows, 3)


async def test_a_refused_call_reports_no_outcome(client: plait.Client) -> None:
    await send(client, 3)
    async with client.consumer("s", group="g") as consumer:
        table = await consumer.fetch_arrow(3, wait=20)
        assert len(table) == 3
        for wrong in ([0, 7], [0, 1.0], np.array([True, False])):
            with pytest.raises(plait.InvalidArgument):
                await table.reject(wrong)  # type: ignore[arg-type]
            with pytest.raises(plait.InvalidArgument):
                await table.nack(wrong)  # type: ignore[arg-type]
        await table.reject(np.array([False, False, True]), "the last")
        await table.ack()
        info = await client.admin.group("s", "g")
        assert (info.lag, info.dead, info.waiting) == (0, 1, 0)
    assert [letter.sequence for letter in await client.admin.dead_letters("s", "g")] == [2]


async def test_masks_span_the_frames_of_a_table(client: plait.Client) -> None:
    for first in range(0, 30, 10):
        await send(client, 10, first=first)
    async with client.consumer("s", group="g", retry=plait.Retry.constant(3600)) as consumer:
        await consumer.fetch_arrow(3, wait=20)
        table = await consumer.fetch_arrow(27, wait=20)
        sequences = table.table["sequence"].to_numpy()
        await table.reject(sequences % 3 == 0)
        await table.nack(pa.array(np.flatnonzero(sequences % 3 == 1)))
        await table.ack()
        info = await client.admin.group("s", "g")
        third = len(sequences[sequences % 3 == 0])
        assert (info.dead, info.waiting) == (third, len(sequences[sequences % 3 == 1]))
    found = await client.admin.dead_letters("s", "g")
    assert [letter.sequence for letter in found] == sequences[sequences % 3 == 0].tolist()
