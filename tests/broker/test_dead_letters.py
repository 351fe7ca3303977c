"""Dead letters: when messages become dead letters, their reasons, and that they are kept until they are settled."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from plait.broker.groups.dead_letters import Choice, Letters
from plait.broker.groups.group import AttachedConsumer, Group
from plait.frame.columns import Column
from plait.limits import ServerLimits
from plait.model.reason import Reason
from plait.model.retry_policy import Retry
from plait.model.settings import SubjectSettings
from plait.storage.logs.retained_log import frame_at
from tests.support.broker_node import Node, Producer, Pulled

ONCE = Retry(attempts=1)


def begin(count: int, *, retry: Retry = ONCE, **settings: Any) -> tuple[Node, AttachedConsumer]:
    """A consumer that holds ``count`` messages, in frames of ten."""
    node = Node(**settings)
    consumer = node.attach("orders", "g", retry=retry)
    for first in range(0, count, 10):
        node.send("orders", *(b"body %d" % n for n in range(first, min(first + 10, count))))
    assert sum(end - start for start, end, _ in node.pull(consumer).ranges) == count
    return node, consumer


def letters(node: Node, group: Group, **choice: Any) -> list[Letters]:
    found, following = node.broker.dead_letters.page(group, Choice(**choice), -1, 10_000)
    assert following is None
    return found


def dead(node: Node, group: Group, **choice: Any) -> list[int]:
    return sorted(s for part in letters(node, group, **choice) for s in part.sequences.tolist())


def bodies(found: list[Letters]) -> dict[int, bytes]:
    read: dict[int, bytes] = {}
    for sequences, frame, _ in found:
        assert frame is not None
        rows = dict(zip(frame.sequences().tolist(), frame.binary(Column.BODY).to_pylist(), strict=True))
        read.update({s: rows[s] for s in sequences.tolist()})
    return read


def resend(node: Node, group: Group, **choice: Any) -> int:
    count = node.broker.dead_letters.resend(group, letters(node, group, **choice))
    node.turn()
    return count


def test_the_last_attempt_that_fails_makes_a_dead_letter_with_its_reason():
    node, consumer = begin(3, retry=Retry(attempts=2, steps=(5,), jitter=0))
    first = node.clock.now()
    node.nack(consumer, (0, 2), delay=None, reason=Reason("ValueError", "first", "on_order"))
    node.later(5.2)
    assert node.pull(consumer).ranges == [(0, 2, 2)]
    node.nack(consumer, (0, 1), delay=None, reason=Reason("KeyError", "'id'", "on_order"))
    node.ack(consumer, (1, 2), (2, 3))
    [letter] = letters(node, consumer.group)
    death = letter.death
    assert death is not None
    assert letter.sequences.tolist() == [0]
    assert death.reason == Reason("KeyError", "'id'", "on_order")
    assert (death.attempts, death.last_time) == (2, node.clock.now())
    assert 0 <= first - death.first_time < 1_000_000, "the time is rounded down to seconds"
    node.later(10_000)
    assert node.pull(consumer).ranges == [], "it is not redelivered"
    assert consumer.group.cursor.floor == 3, "it does not hold back the floor"


def test_without_an_attempt_limit_a_message_is_retried_without_end():
    node, consumer = begin(1, retry=Retry(attempts=None, steps=(1,), jitter=0))
    for attempt in range(2, 60):
        node.nack(consumer, (0, 1), delay=None)
        node.later(1.5)
        assert node.pull(consumer).ranges == [(0, 1, attempt)]


def test_a_message_that_is_too_old_is_not_retried():
    node, consumer = begin(10, retry=Retry(attempts=100, expires=60.0))
    node.clock.advance(40)
    node.send("orders", *(b"body %d" % n for n in range(10, 20)))
    node.pull(consumer)
    node.nack(consumer, (5, 15), delay=0.0)
    assert dead(node, consumer.group) == []
    node.clock.advance(30)
    node.contact(consumer)
    node.pull(consumer)
    node.nack(consumer, (5, 15), delay=0.0)
    assert dead(node, consumer.group) == [5, 6, 7, 8, 9], "these were stored more than a minute ago"
    assert node.pull(consumer).ranges == [(10, 15, 3)]


@pytest.mark.parametrize(("attempts", "lives"), [(1, 16), (20, 20)])
def test_a_message_that_crashes_its_consumers_becomes_a_dead_letter(attempts: int, lives: int):
    node, consumer = begin(2, retry=Retry(attempts=attempts))
    for life in range(1, lives + 1):
        assert dead(node, consumer.group) == [], "a few lost consumers do not make a dead letter"
        node.clock.advance(6)
        assert [count for _, count in node.membership.lose_silent()] == [2]
        node.turn()
        if life < lives:
            consumer = node.attach("orders", "g", f"c{life + 1}")
            assert node.pull(consumer).ranges == [(0, 2, life + 1)]
    [letter] = letters(node, node.group("orders", "g"))
    assert letter.sequences.tolist() == [0, 1]
    assert letter.death is not None
    assert letter.death.reason.type == "ConsumerLost"
    assert f"c{lives}" in letter.death.reason.text


def test_a_resent_letter_is_the_same_message_and_only_its_group_gets_it():
    node, consumer = begin(5)
    other = node.attach("orders", "other")
    before = {row.sequence: row for row in node.pull(other).rows}
    node.ack(other, (0, 5))
    node.nack(consumer, (2, 4), delay=None)
    assert resend(node, consumer.group) == 2
    got = node.pull(consumer)
    assert got.ranges == [(2, 4, 2)], "the attempt count continues"
    assert got.rows == [before[2], before[3]]
    assert node.pull(other).ranges == []
    assert resend(node, consumer.group) == 0, "nothing is resent twice"


def test_a_resent_letter_is_not_judged_by_its_age_again():
    node, consumer = begin(1, retry=Retry(attempts=3, expires=60.0))
    node.clock.advance(100)
    node.contact(consumer)
    node.nack(consumer, (0, 1))
    assert resend(node, consumer.group) == 1
    for attempt in (2, 3, 4):
        assert node.pull(consumer).ranges == [(0, 1, attempt)]
        node.nack(consumer, (0, 1))
    assert dead(node, consumer.group) == [0]


def test_dead_letters_outlast_the_retention_of_their_subject():
    node, consumer = begin(30, retention_seconds=60.0)
    node.nack(consumer, (3, 5), (9, 12), delay=None)
    node.ack(consumer, (0, 3), (5, 9), (12, 30))
    node.clock.advance(100)
    for _ in range(4):
        node.send("orders", b"x" * 7500)
    for _ in range(6):
        node.checkpoint()
    assert node.retention.run(), "segments are deleted"
    assert node.partition("orders").start == 30
    node = node.killed()
    consumer = node.attach("orders", "g", holds=[])
    group = consumer.group
    assert bodies(letters(node, group)) == {n: b"body %d" % n for n in (3, 4, 9, 10, 11)}
    assert resend(node, group, sequences=[4, 9, 11]) == 3
    got = node.pull(consumer, 3)
    assert {row.sequence: row.body for row in got.rows} == {4: b"body 4", 9: b"body 9", 11: b"body 11"}
    assert group.lost_count == 0
    node.nack(consumer, (9, 10, 1), delay=None, reason=Reason("Again"))
    assert dead(node, group, type="Again") == [9]
    assert bodies(letters(node, group, type="Again")) == {9: b"body 9"}


def test_purged_letters_and_their_segments_are_deleted():
    node, consumer = begin(200)
    for first in range(0, 200, 10):
        node.nack(consumer, (first, first + 10), delay=None)
    assert len(node.broker.retained_log.segments) > 1
    assert node.broker.dead_letters.purge(consumer.group, letters(node, consumer.group)) == 200
    node.turn()
    for _ in range(6):
        node.checkpoint()
    for _ in range(2):
        # A segment is deleted once the purge of its letters is durable.
        node.retention.run()
        node.turn()
    assert len(node.broker.retained_log.segments) == 1
    assert dead(node.killed(), node.group("orders", "g")) == []


def test_letters_are_deleted_after_the_time_for_which_the_server_keeps_them():
    node, consumer = begin(30, dead_seconds=86_400.0, retention_seconds=None)
    node.nack(consumer, (0, 10), delay=None)
    node.clock.advance(50_000)
    node.nack(consumer, (10, 20), delay=None)
    node.clock.advance(50_000)
    node.retention.run()
    node.turn()
    assert dead(node, consumer.group) == list(range(10, 20))
    assert dead(node.killed(), node.group("orders", "g")) == list(range(10, 20))


def test_a_rewind_keeps_the_dead_letters_before_its_position():
    node, consumer = begin(20)
    node.nack(consumer, (2, 4), (15, 16), delay=None)
    node.membership.detach(consumer)
    node.membership.rewind("orders", "g", ["sequence", 10], skipping=True)
    node.turn()
    consumer = node.attach("orders", "g", "c2")
    assert dead(node, consumer.group) == [2, 3]
    assert node.pull(consumer).ranges == [(10, 20, 1)]


def test_pages_list_every_letter_once():
    node, consumer = begin(100)
    node.nack(consumer, *((n, n + 1) for n in range(0, 100, 3)), delay=None)
    for choice in (Choice(), Choice(sequences=list(range(100)))):
        got: list[int] = []
        after: int | None = -1
        while after is not None:
            page, after = node.broker.dead_letters.page(consumer.group, choice, after, 7)
            got += sorted(s for part in page for s in part.sequences.tolist())
        assert got == list(range(0, 100, 3))


def test_a_filtered_page_searches_beyond_its_length():
    node, consumer = begin(100)
    node.nack(consumer, *((n, n + 1) for n in range(99)), delay=None, reason=Reason("A"))
    node.nack(consumer, (99, 100), delay=None, reason=Reason("B"))
    letters_of = node.broker.dead_letters
    [found], following = letters_of.page(consumer.group, Choice(type="B"), -1, 1, 1000)
    assert (found.sequences.tolist(), following) == ([99], None)
    found, following = letters_of.page(consumer.group, Choice(type="B"), -1, 1, 50)
    assert (found, following) == ([], 49)
    got: list[int] = []
    after: int | None = -1
    while after is not None:
        page, after = letters_of.page(consumer.group, Choice(type="A"), after, 7, 20)
        assert sum(len(part.sequences) for part in page) <= 7
        got += sorted(s for part in page for s in part.sequences.tolist())
    assert got == list(range(99))


def test_letters_can_be_chosen_by_handler_and_time():
    node, consumer = begin(10)
    node.nack(consumer, (0, 2), delay=None, reason=Reason("A", "", "one"))
    node.clock.advance(1)
    moment = node.clock.now()
    node.nack(consumer, (2, 4), delay=None, reason=Reason("A", "", "two"))
    group = consumer.group
    assert dead(node, group, type="A", handler="two") == [2, 3]
    assert dead(node, group, before=moment) == [0, 1]
    assert dead(node, group, type="B") == []


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_only_the_dead_rows_of_a_compressed_frame_are_retained(compression: str):
    node = Node(message_segment_size=1 << 20)
    producer = Producer(5)
    sent = producer.frame("orders", *(b"%03d" % n + b"x" * 500 for n in range(500)), compression=compression)
    node.submit(sent)
    node.turn()
    consumer = node.attach("orders", "g", retry=ONCE)
    node.pull(consumer)
    node.nack(consumer, (7, 8), delay=None)
    assert bodies(letters(node, consumer.group)) == {7: b"007" + b"x" * 500}
    assert node.broker.retained_log.end < 2000


def test_letters_of_many_producers_keep_their_ids():
    node = Node()
    sent = [node.submit(Producer(100 + n).frame("orders", b"%d" % n)) for n in range(20)]
    node.turn()
    assert {s.sequence for s in sent} == set(range(20))
    consumer = node.attach("orders", "g", retry=ONCE)
    node.pull(consumer)
    node.nack(consumer, (4, 5), (11, 13), delay=None)
    [letter] = letters(node, consumer.group)
    assert letter.frame is not None
    producers, numbers = letter.frame.message_ids()
    assert producers.tolist() == [104, 111, 112]
    assert numbers.tolist() == [1, 1, 1]
    assert len(letter.frame.runs()) <= 7


def test_without_space_for_letters_messages_wait_and_none_is_lost():
    node, consumer = begin(5)
    node.disk.fail("allocate", error=errno.ENOSPC, path="retained/*")
    assert node.nack(consumer, (0, 5), delay=None) == [True]
    assert dead(node, consumer.group) == []
    assert consumer.group.cursor.waiting.count == 5
    node.later(10)
    assert node.pull(consumer).ranges == [(0, 5, 2)]
    node.nack(consumer, (0, 5), delay=None)
    assert dead(node, consumer.group) == [0, 1, 2, 3, 4], "there is space again"


def test_an_unreadable_letter_is_reported_and_the_others_are_listed():
    node, consumer = begin(30)
    for first in (0, 10, 20):
        node.nack(consumer, (first, first + 1), delay=None, reason=Reason("A"))
    node.checkpoint()
    offset = node.group("orders", "g").retained.offsets.get(10)
    assert offset is not None
    segment = node.broker.retained_log.segment_at(offset)
    node.disk.flip_bit(f"retained/{segment.base:020d}.log", offset - segment.base + 90, 3)
    group = consumer.group
    assert dead(node, group) == [0, 10, 20]
    assert dead(node, group, type="A") == [0, 20]
    [broken] = [part for part in letters(node, group) if part.frame is None]
    assert broken.sequences.tolist() == [10]
    assert resend(node, group, sequences=[10]) == 1
    assert node.pull(consumer).bodies == [b"body 10"], "the message log still has it"


def full(retained_messages: int = 5, **settings: Any) -> tuple[Node, AttachedConsumer, Pulled]:
    """A group at its limit of retained messages, with a suspended pull."""
    node, consumer = begin(10, limits=ServerLimits(retained_messages=retained_messages), **settings)
    node.send("orders", b"new")
    node.nack(consumer, (0, retained_messages), delay=None)
    waiting = node.pull(consumer, wait=30)
    assert not waiting.answered
    return node, consumer, waiting


def test_a_group_with_too_many_retained_messages_gets_no_new_ones_until_some_are_purged():
    node, consumer, waiting = full()
    node.broker.dead_letters.purge(consumer.group, letters(node, consumer.group))
    node.turn()
    assert waiting.bodies == [b"new"]


def test_a_group_with_too_many_retained_messages_continues_when_resent_ones_are_done():
    node, consumer, waiting = full()
    resend(node, consumer.group)
    assert waiting.ranges == [(0, 5, 2)]
    node.ack(consumer, (0, 5))
    waiting = node.pull(consumer, wait=30)
    assert not waiting.answered
    node.retention.run()
    assert waiting.bodies == [b"new"]


def test_letters_purged_before_a_restart_are_not_counted_after_it():
    node, consumer, _ = full()
    node.broker.dead_letters.purge(consumer.group, letters(node, consumer.group, sequences=[0, 1]))
    node.turn()
    assert len(consumer.group.retained) == 3
    node, consumer, _ = full(retained_messages=6)
    node.broker.dead_letters.resend(consumer.group, letters(node, consumer.group))
    node.ack(consumer, (0, 6))
    node.turn()
    node = node.restart()
    node.retention.run()
    assert len(node.group("orders", "g").retained) == 0


def test_a_message_that_would_exceed_the_letter_limit_waits():
    node, consumer = begin(10, limits=ServerLimits(retained_messages=5))
    node.nack(consumer, (0, 4), delay=None)
    node.nack(consumer, (4, 10), delay=None)
    assert dead(node, consumer.group) == [0, 1, 2, 3]
    assert consumer.group.cursor.waiting.count == 6


def test_retention_copies_no_more_than_the_limit_and_reports_lost_rows():
    limits = ServerLimits(retained_messages=5)
    node, consumer = begin(10, limits=limits, retention_seconds=50.0, retry=Retry(attempts=None))
    node.nack(consumer, (0, 3), (6, 9), delay=1000.0)
    node.ack(consumer, (3, 6), (9, 10))
    node.clock.advance(100)
    node.retention.run()
    assert node.partition("orders").start == 10
    assert (len(consumer.group.retained), consumer.group.lost_count) == (0, 6), "all six are in one frame"


def spoil(node: Node, group: Group, sequence: int, column: Column) -> None:
    """Flip a bit in one column of the frame with the copy of a message."""
    offset = group.retained.offsets.get(sequence)
    assert offset is not None
    frame = frame_at(node.broker.retained_log, offset)
    assert frame is not None
    segment = node.broker.retained_log.segment_at(offset)
    _, start, end = frame.places[column]
    node.disk.flip_bit(f"retained/{segment.base:020d}.log", offset - segment.base + end - 1 - (end - start) // 2, 1)


@pytest.mark.parametrize("column", [Column.SELECTION, Column.NOTE, Column.BODY])
def test_a_damaged_copy_loses_only_its_messages(column: Column):
    node, consumer = begin(30, retention_seconds=50.0, retry=Retry(attempts=None))
    node.nack(consumer, *((n, n + 1) for n in range(0, 30, 2)), delay=1000.0)
    node.ack(consumer, *((n, n + 1) for n in range(1, 30, 2)))
    node.clock.advance(100)
    node.contact(consumer)
    node.send("orders", b"new")
    node.retention.run()
    assert (node.partition("orders").start, len(consumer.group.retained)) == (30, 15)
    spoil(node, consumer.group, 12, column)
    waiting = node.pull(consumer, wait=1)
    assert waiting.bodies == [b"new"]
    node.retention.run()
    node.later(1000)
    node.contact(consumer)
    assert node.pull(consumer).bodies == [b"body %d" % n for n in (*range(0, 10, 2), *range(20, 30, 2))]
    assert consumer.group.lost_count == 5
    node.retention.run()


def test_a_pull_over_many_lost_copies_does_not_read_each():
    node = Node(message_segment_size=1 << 22, retained_segment_size=1 << 22, action_segment_size=1 << 22)
    consumer = node.attach("orders", "g", retry=Retry(attempts=1))
    node.send("orders", *[b"x"] * 4000)
    node.pull(consumer, 4000)
    node.nack(consumer, (0, 4000), delay=None)
    node.broker.catalog.update_subject("orders", SubjectSettings(retention_seconds=10.0))
    node.clock.advance(100)
    node.retention.run()
    spoil(node, consumer.group, 0, Column.BODY)
    assert resend(node, consumer.group) == 4000
    looks: list[int] = []
    whole = consumer.group.retained.frame
    kept = consumer.group.retained

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(kept, name)

        def __len__(self) -> int:
            return len(kept)

        def frame(self, log: Any, sequence: int) -> Any:
            looks.append(sequence)
            return whole(log, sequence)

    consumer.group.retained = Counting()  # type: ignore[assignment]
    assert node.pull(consumer, 4000).ranges == []
    assert consumer.group.lost_count == 4000
    assert len(looks) < 5


def test_a_letter_with_a_damaged_copy_does_not_expire():
    node, consumer = begin(10, dead_seconds=86_400.0, retention_seconds=None)
    node.nack(consumer, (0, 4), delay=None)
    spoil(node, consumer.group, 0, Column.NOTE)
    node.clock.advance(200_000)
    node.retention.run()
    assert dead(node, consumer.group) == [0, 1, 2, 3]


def test_a_damaged_original_does_not_hide_its_copy():
    node, consumer = begin(10)
    node.nack(consumer, (0, 4), delay=None)
    record = node.partition("orders").consume_log.record(0)
    node.disk.flip_bit(f"message/{0:020d}.log", record.offset + record.size - 20, 1)
    assert resend(node, consumer.group) == 4
    assert node.pull(consumer).bodies == [b"body %d" % n for n in range(4)]


def test_a_damaged_message_does_not_block_retention():
    node, consumer = begin(10, retention_seconds=50.0, retry=Retry(attempts=None))
    node.nack(consumer, (0, 4), delay=1000.0)
    record = node.partition("orders").consume_log.record(0)
    node.disk.flip_bit(f"message/{0:020d}.log", record.offset + record.size - 20, 1)
    node.clock.advance(100)
    node.retention.run()
    assert node.partition("orders").start == 10
    assert consumer.group.lost_count == 4


def test_a_copy_of_a_lost_row_is_not_used_for_the_row_that_has_its_sequence_now():
    node = Node(retention_seconds=100.0)
    producer = Producer(5)
    node.send("orders", b"first")
    consumer = node.attach("orders", "g")
    node.pull(consumer)
    node.ack(consumer, (0, 1))
    node.checkpoint()
    node.send("orders", b"old")
    node.pull(consumer)
    node.nack(consumer, (1, 2), reject=True)
    node.broker.retained_log.sync()
    node = node.power_lost()
    consumer = node.attach("orders", "g")
    node.send("orders", b"new", producer=producer)
    node.pull(consumer)
    node.nack(consumer, (1, 2), delay=1000.0)
    for _ in range(4):
        node.clock.advance(60)
        node.send("orders", b"z" * 3000, producer=producer)
        node.checkpoint()
        node.retention.run()
        node.turn()
    node.later(1000)
    node.contact(consumer)
    assert node.pull(consumer, 1).bodies == [b"new"]


def test_dead_letters_that_a_rewind_brings_again_are_delivered_once():
    node, consumer = begin(10)
    node.nack(consumer, (5, 6), (7, 8), reject=True)
    node.ack(consumer, (0, 5), (6, 7), (8, 10))
    node.membership.detach(consumer)
    node.membership.rewind("orders", "g", "earliest")
    node.turn()
    first, second = node.attach("orders", "g", "c1"), node.attach("orders", "g", "c2")
    assert resend(node, first.group) == 0
    got = [*node.pull(first, 2).rows, *node.pull(second).rows]
    assert sorted(row.sequence for row in got) == list(range(10))
    again = node.killed()
    assert again.group("orders", "g").cursor.next == first.group.cursor.next == 10


def test_a_broadcast_group_has_dead_letters():
    node = Node()
    consumer = node.attach("orders", None, retry=ONCE)
    node.send("orders", b"a", b"b")
    node.pull(consumer)
    node.nack(consumer, (0, 1), delay=None)
    node.ack(consumer, (1, 2))
    name = consumer.group.name
    assert dead(node, consumer.group) == [0]
    again = node.killed()
    assert dead(again, again.group("orders", name)) == [0]
    assert again.pull(again.attach("orders", None)).ranges == []
