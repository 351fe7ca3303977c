"""Queries of a log in which a bit is wrong: they find what readers find, whatever the index says."""

from __future__ import annotations

import numpy as np
import pytest

from plait.broker.query import message_index
from plait.broker.query.search import QueryTerms, Search
from plait.frame.builder import assemble, body_column, build_frame
from plait.frame.columns import Codec, Column
from plait.frame.header import HEADER_SIZE
from plait.frame.view import frames_in
from tests.support.broker_node import Node, Producer, Sent

HASH = 7 << 50


def indexed_node(monkeypatch: pytest.MonkeyPatch, frames: int = 5) -> Node:
    """A sealed and indexed segment with frames of two rows, of which the second one has the key "k"."""
    monkeypatch.setattr(message_index, "AHEAD_SIZE", 1)
    node, producer = Node(message_segment_size=1 << 20), Producer(7)
    for _ in range(frames):
        parts = build_frame(
            [b"x", b"y"],
            producer=producer.id,
            first=producer.next,
            previous=producer.next - 1,
            keys=[b"other", b"k"],
            key_hashes=np.array([1 << 40, HASH], np.uint64),
        )
        producer.next += 2
        node.submit(Sent("a", parts.tobytes(), []))
        node.turn()
    index_all(node)
    return node


def index_all(node: Node) -> None:
    """Seal the newest segment, and index it."""
    node.broker.message_log.roll()
    node.send("b", b"in the next segment")
    node.sync()
    index = node.broker.message_index
    index.look()
    while (work := index.begin()) is not None:
        work.run()
        work.done()
    assert index.of(node.broker.message_log.segments[0]) is not None


def found(node: Node, terms: QueryTerms) -> list[int]:
    """The sequences that a query finds."""
    broker, partition = node.broker, node.partition("a")
    rows: list[int] = []
    start, end = partition.start, partition.visible
    while start < end:
        search = Search(partition, broker.message_log, broker.message_index, terms, broker.turn.scans.budget)
        batch = search.run(start, end, 1000, 1 << 20)
        rows += [row for frame in frames_in(b"".join(batch.parts)) for row in frame.verify().sequences().tolist()]
        assert batch.next > start
        start = batch.next
        broker.turn.scans.next_turn()
    return rows


def test_a_wrong_bit_in_the_header_of_a_frame_hides_no_other_frame(monkeypatch: pytest.MonkeyPatch):
    node = indexed_node(monkeypatch)
    partition, log = node.partition("a"), node.broker.message_log
    by_key, by_id = QueryTerms((b"k", HASH)), QueryTerms(message_id=(7, 8))
    assert found(node, by_key) == [1, 3, 5, 7, 9]
    record = partition.consume_log.record(1)
    segment = log.segments[0]
    path, at = log.files.path(segment.base), record.offset - segment.base
    for bit in range(8 * HEADER_SIZE):
        node.disk.flip_bit(path, at + bit // 8, bit % 8)
        readable = [first + 1 for first, _, frame in partition.walk(log, 0, partition.visible) if frame is not None]
        assert set(readable) >= {1, 5, 7, 9}
        assert found(node, by_key) == readable, f"bit {bit}"
        assert found(node, by_id) == [7], f"bit {bit}"
        node.disk.flip_bit(path, at + bit // 8, bit % 8)
    assert found(node, by_key) == [1, 3, 5, 7, 9]


def test_a_hash_that_is_stored_once_for_all_rows_is_indexed(monkeypatch: pytest.MonkeyPatch):
    """Only a client that is not Plait's sends such frames."""
    monkeypatch.setattr(message_index, "AHEAD_SIZE", 1)
    node = Node(message_segment_size=1 << 20)
    keys = np.arange(1001, dtype=np.int32).tobytes() + b"k" * 1000
    parts = assemble(
        [
            (Column.KEY_HASH, Codec.CONST, [np.array([HASH], np.uint64).tobytes()]),
            (Column.KEY, Codec.RAW, [keys]),
            body_column([b""] * 1000, "zstd"),
        ],
        count=1000,
        producer=7,
        first=1,
        previous=0,
        flags=0,
    )
    node.submit(Sent("a", parts.tobytes(), []))
    node.turn()
    index_all(node)
    assert found(node, QueryTerms((b"k", HASH))) == list(range(1000))
