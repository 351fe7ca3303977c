"""Rows of a table that failed: numbers and masks of any kind, all looked at before anything is said of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import plait
from plait.client.consume.batch import row_mask
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
def test_rows_in_any_form(rows: Any):
    assert row_mask(rows, 3).tolist() == [False, True, True]


@pytest.mark.parametrize("none", [[], (), np.array([]), np.array([], bool), pa.array([], pa.int64()), iter(())])
def test_no_rows_are_none(none: Any):
    assert row_mask(none, 3).tolist() == [False] * 3


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([0, 7], "row 7 is outside a batch of 3"),
        ([-1], "row -1 is outside a batch of 3"),
        (np.array([1 << 63], np.uint64), "row 9223372036854775808 is outside"),
        ([True, False], "a mask of 2 rows does not fit a batch of 3"),
        (pa.array([True] * 4), "a mask of 4 rows does not fit"),
        ([1.0], "rows .* are not understood; use whole numbers, or a mask"),
        (np.array([1.5]), "are not understood"),
        (pa.array([1, None]), "are not understood"),
        (pa.array([True, None, True]), "are not understood"),
        (np.array([[0, 1]]), "are not understood"),
        (np.array(1), "are not understood"),
        ([[0], [1, 2]], "are not understood"),
        ([2**70], "are not understood"),
        (["0"], "are not understood"),
        ("01", "are not understood"),
        (1, "are not understood"),
        (True, "are not understood"),
    ],
)
def test_rows_that_cannot_be_are_refused(rows: Any, complaint: str):
    with pytest.raises(plait.InvalidArgument, match=complaint):
        row_mask(rows, 3)


async def test_a_refused_row_says_nothing_of_the_others(client: plait.Client) -> None:
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


async def test_masks_reach_over_the_frames_of_a_table(client: plait.Client) -> None:
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
