"""Header blocks become the same maps and type letters as headers that are decoded row by row, without Spark."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plait.client.send.encoding import encode_headers
from plait.frame import FrameView, build_frame
from plait.spark.history.selection import text_of
from plait.spark.source.block_maps import letter_array, map_array
from plait.spark.source.header_columns import letters_of, maps_of
from plait.spark.source.joined_frames import Frames
from plait.spark.source.spark_columns import COLUMNS, STORED_COLUMNS
from plait.storage.reading.log_chunks import ChunkPartition
from tests.frame.samples import relaxed, small_blocks

HEADERS = st.fixed_dictionaries(
    {"city": st.sampled_from(["BJS", "größe"])},
    optional={
        "amount": st.integers(-(1 << 63), (1 << 63) - 1),
        "price": st.sampled_from([0.0, -0.0, 1.0, 1e300, 0.1, float("inf")]),
        "vip": st.booleans(),
        "mixed": st.one_of(st.booleans(), st.text(max_size=3)),
    },
)


def view(rows: list[dict[str, Any]]) -> FrameView:
    with small_blocks():
        frame = build_frame([b"body"] * len(rows), producer=1, first=1, headers=[encode_headers(row) for row in rows])
    return FrameView(frame.tobytes()).validate()


@relaxed
@given(st.lists(st.one_of(HEADERS, st.just({})), min_size=16, max_size=50))
def test_a_block_gives_the_maps_and_letters_of_its_rows(rows: list[dict[str, Any]]):
    block = view(rows).header_block()
    if block is None:
        return
    maps = [each or None for each in block.maps()]
    for built, expected in (
        (map_array(block), maps_of(maps, len(rows))),
        (letter_array(block), letters_of(maps, len(rows))),
    ):
        built.validate(full=True)
        assert built.type == expected.type
        assert built.to_pylist() == expected.to_pylist()


@relaxed
@given(st.lists(st.lists(st.one_of(HEADERS, st.just({})), min_size=1, max_size=20), min_size=1, max_size=4))
def test_a_batch_has_the_headers_of_all_its_frames(rows: list[list[dict[str, Any]]]):
    members = [(ChunkPartition("s", "s"), view(each)) for each in rows]
    frames = Frames(members, "g1")
    expected = [{name: text_of(value) for name, value in row.items()} for each in rows for row in each]
    built = COLUMNS["headers"].build(frames).to_pylist()
    assert [dict(each or ()) for each in built] == expected
    letters = STORED_COLUMNS["header_types"].build(frames)
    assert len(letters) == len(expected)
