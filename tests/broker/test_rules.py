"""The rules of the design, each with a scenario in which the naive design fails.

Every scenario passes with the real classes. ``DEFECTS`` restores the naive behaviour, one rule at a time, and the
scenario must fail: a rule whose test passes without it is not tested.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from plait.errors import OutOfSequence, ProducerConflict, UnknownProducer
from plait.frame.builder import build_frame
from plait.model.retry_policy import Retry
from plait.storage.checkpoint import DIRECTORY as CHECKPOINTS
from plait.storage.logs.recovery import QUARANTINE
from tests.broker.retention_rules import (
    r21_a_segment_is_deleted_when_all_its_partitions_allow,
    r21_both_logs_are_kept_from_the_oldest_checkpoint_on,
    r21_the_start_moves_and_an_overtaken_group_can_see_it,
)
from tests.support import broker_defects as defects
from tests.support.broker_node import Node, Producer, Pulled, Sent

# --- R1 -----------------------------------------------------------------------------------------


def r1_a_checkpoint_writes_only_what_changed() -> None:
    node = Node()
    for number in range(640):
        node.membership.attach(f"s{number}", "g", "c1")
    node.turn()
    sizes: list[int] = []
    node.disk.on_operation = lambda operation, path, size: sizes.append(size if path.startswith(CHECKPOINTS) else 0)
    node.checkpoint()
    everything = sum(sizes)
    sizes.clear()
    node.send("s5", b"a")
    node.checkpoint()
    assert sum(sizes) < everything / 6
    assert len(node.killed().broker.subjects) == 640


def r1_a_cursor_is_one_sequence_and_its_exceptions() -> None:
    node = Node(message_segment_size=1 << 20, action_segment_size=1 << 20)
    for _ in range(20):
        node.send("orders", *[b"x"] * 1000)
    consumer = node.attach("orders", "g")
    for number in range(20):
        node.pull(consumer, 1000)
        node.ack(consumer, (number * 1000, number * 1000 + 998))
    sizes: list[int] = []
    node.disk.on_operation = lambda operation, path, size: sizes.append(size if "partitions" in path else 0)
    node.checkpoint()
    assert sum(sizes) < 2000


# --- R2 -----------------------------------------------------------------------------------------


def r2_only_acknowledged_rows_are_visible() -> None:
    node = Node(flush="sync")
    node.send("orders", b"durable")
    consumer = node.attach("orders", "g")
    waiting = node.pull(node.attach("orders", "h", start="latest"), wait=30)
    reading = node.read("orders", 1, wait=30)
    sent = node.submit(Producer(7).frame("orders", b"written"))
    node.commit()
    assert sent.answers == []
    pulled = Pulled()
    node.broker.pull(consumer, 100, 1 << 20, 0, pulled.answer)
    assert pulled.bodies == [b"durable"]
    assert node.membership.attach("orders", "i", "c1", start="latest").group.cursor.next == 1
    work = node.broker.turn.begin_sync()
    work.run()
    assert (sent.answers, waiting.answered, reading.answers) == ([], False, [])
    node.broker.turn.end_sync(work)
    assert sent.sequence == 1
    assert waiting.bodies == [b"written"]
    assert len(reading.answers) == 1


def r2_a_row_is_written_before_it_is_delivered() -> None:
    node = Node(flush="async")
    node.send("orders", b"first")
    waiting = node.pull(node.attach("orders", "g", start="latest"), wait=30)
    node.commit()
    writes: list[tuple[str, bool]] = []
    node.disk.on_operation = lambda operation, path, size: writes.append((path.split("/")[0], waiting.answered))
    sent = node.submit(Producer(8).frame("orders", b"second"))
    node.commit()
    # One commit: the message, then its delivery, then the event of the delivery, then the receipt.
    assert writes == [("message", False), ("action", True)]
    assert (waiting.bodies, sent.sequence) == ([b"second"], 1)
    node = node.killed()
    assert node.pull(node.attach("orders", "h")).bodies == [b"first", b"second"]


# --- R3 -----------------------------------------------------------------------------------------


def r3_events_that_depend_on_lost_messages_are_not_replayed() -> None:
    node = Node(flush="async")
    producer = Producer(7)
    node.send("orders", b"old", producer=producer)
    consumer = node.attach("orders", "g")
    node.pull(consumer)
    node.ack(consumer, (0, 1))
    node.sync()
    for number in range(5):
        node.send("orders", b"lost %d" % number, producer=producer)
    node.pull(consumer)
    node.ack(consumer, (1, 6))
    # The operating system writes the action log first; then the power fails.
    node.broker.action_log.begin_sync().run()
    again = node.power_lost()
    assert again.bodies("orders") == [b"old"]
    assert again.group("orders", "g").cursor.next == 1
    other = Producer(8)
    for number in range(3):
        assert again.send("orders", b"new %d" % number, producer=other).sequence == number + 1
    again.clock.advance(6)
    again.membership.lose_silent()
    assert again.pull(again.attach("orders", "g", "c2")).bodies == [b"new 0", b"new 1", b"new 2"]


def r3_a_dead_letter_without_its_copy_does_not_count() -> None:
    node = Node(flush="async")
    consumer = node.attach("orders", "g", retry=Retry(attempts=1))
    node.send("orders", b"a", b"b")
    node.pull(consumer)
    node.sync()
    node.nack(consumer, (0, 2), delay=None)
    assert consumer.group.failures.dead.count == 2
    # The operating system writes the action log first; then the power fails.
    node.broker.action_log.begin_sync().run()
    again = node.power_lost()
    assert again.group("orders", "g").failures.dead.count == 0
    again.clock.advance(6)
    again.membership.lose_silent()
    assert again.pull(again.attach("orders", "g", "c2")).bodies == [b"a", b"b"]


def r21_rows_that_a_group_holds_outlast_retention() -> None:
    node = Node(retention_seconds=10.0)
    consumer = node.attach("orders", "g")
    node.send("orders", b"a", b"b", b"c")
    node.pull(consumer)
    node.nack(consumer, (0, 2), delay=60.0)
    node.clock.advance(30.0)
    node.contact(consumer)
    node.retention.run()
    assert node.partition("orders").start == 3
    node.later(40.0)
    assert node.pull(consumer).bodies == [b"a", b"b"]
    node.nack(consumer, (2, 3))
    assert node.pull(consumer).bodies == [b"c"]
    assert consumer.group.lost_count == 0


def r3_every_unclean_start_opens_a_new_epoch() -> None:
    node = Node()
    assert node.broker.turn.epoch == 1
    node = node.killed()
    assert node.broker.turn.epoch == 2
    node = node.restart()
    assert (node.report.clean, node.broker.turn.epoch) == (True, 2)
    node.send("orders", b"acknowledged and lost")
    again = node.power_lost()
    assert again.bodies("orders") == []
    assert (again.report.clean, again.broker.turn.epoch) == (False, 3)


# --- R7 -----------------------------------------------------------------------------------------


def r7_a_refused_frame_is_not_overtaken() -> None:
    node = Node()
    producer = Producer(7)
    one, two, three = (producer.frame("orders", b"%d" % n) for n in (1, 2, 3))
    node.submit(one)
    node.broker.turn.low_space = "full for a moment"
    node.submit(two)
    node.broker.turn.low_space = ""
    node.submit(three)
    node.turn()
    assert one.acknowledged
    assert not two.acknowledged
    assert isinstance(three.error, OutOfSequence)
    assert three.error.details["last"] == 1
    for sent in (two, three, two, three):
        again = node.submit(Sent("orders", sent.data, sent.bodies))
        node.turn()
        assert again.acknowledged
    assert node.bodies("orders") == [b"1", b"2", b"3"]


def r7_runs_of_joined_frames_are_known_after_a_start() -> None:
    node = Node()
    sends = [node.submit(Producer(number).frame("orders", b"%d" % number)) for number in (5, 6, 7)]
    node.turn()
    again = node.killed()
    for sent in sends:
        resent = again.submit(Sent("orders", sent.data, sent.bodies))
        again.turn()
        assert resent.sequence == sent.sequence
    assert again.bodies("orders") == [b"5", b"6", b"7"]


# --- R9 -----------------------------------------------------------------------------------------


def r7_other_rows_with_stored_producer_sequences_are_refused() -> None:
    """Producer ids are visible in message ids, so another process can send rows with the id of a producer."""
    for joined in (False, True):
        for end in ("same", "restart", "killed"):
            node, real, forger = Node(), Producer(1), Producer(1)
            node.send("orders", b"1", producer=real)
            forger.next, forger.last = real.next, dict(real.last)
            forged = [node.submit(forger.frame("orders", b"forged %d" % n)) for n in range(3)]
            if joined:
                node.submit(Producer(2).frame("orders", b"x"))
            node.turn()
            assert all(sent.acknowledged for sent in forged), "they do not differ from real rows yet"
            if end != "same":
                node = getattr(node, end)()
            for n in range(3):
                sent = node.send("orders", b"real %d" % n, producer=real)
                assert not sent.acknowledged, "a row that is not stored is not acknowledged"
                assert isinstance(sent.error, ProducerConflict), sent.error
            again = node.submit(Sent("orders", forged[1].data, forged[1].bodies))
            node.turn()
            assert again.sequence == forged[1].sequence, "stored rows are recognized"
            parts = build_frame(forged[1].bodies, producer=1, first=forged[1].view.first, previous=1)
            renamed = node.submit(Sent("orders", parts.tobytes(), forged[1].bodies))
            node.turn()
            assert renamed.sequence == forged[1].sequence, "whatever previous sequence the frame has"


def r9_producers_are_remembered_and_after_a_time_forgotten_with_an_error() -> None:
    node = Node(flush="sync")
    producer = Producer(7)
    first = node.send("orders", b"a", producer=producer)
    node = node.restart().restart()
    again = node.submit(Sent("orders", first.data, first.bodies))
    node.turn()
    assert again.sequence == first.sequence, "checkpoints include the state of producers"
    assert node.bodies("orders") == [b"a"]
    node.clock.advance(7 * 86400 + 1)
    for now in (node, node.killed()):
        now.broker.producers.forget(node.clock.now())
        assert len(now.broker.producers) == 0
        sent = producer.frame("orders", b"b")
        producer.last["orders"] = 1
        now.submit(sent)
        now.turn()
        assert isinstance(sent.error, UnknownProducer)


# --- R10 ----------------------------------------------------------------------------------------


def r10_an_ack_of_an_earlier_epoch_does_not_apply_to_other_messages() -> None:
    node = Node(flush="async")
    node.send("orders", b"kept")
    node.attach("orders", "g")
    node.sync()
    for number in range(4):
        node.send("orders", b"lost %d" % number)
    assert node.pull(node.group("orders", "g").consumers["c1"]).ranges == [(0, 5, 1)]
    again = node.power_lost()
    other = Producer(8)
    for number in range(4):
        again.send("orders", b"new %d" % number, producer=other)
    again.clock.advance(6)
    again.membership.lose_silent()
    consumer = again.attach("orders", "g", "c2")
    # The client acks rows that were delivered before the power loss.
    assert again.ack(consumer, (0, 5, node.broker.turn.epoch)) == [True]
    assert again.pull(consumer).bodies == [b"new %d" % number for number in range(4)]
    again.membership.detach(consumer)
    holder = again.attach("orders", "g", "c3", holds=[(1, 5, node.broker.turn.epoch)])
    assert again.pull(holder).bodies == [b"new %d" % number for number in range(4)], (
        "a hold of the earlier epoch does not apply either"
    )


# --- R12 ----------------------------------------------------------------------------------------


def r12_at_most_once_rows_are_delivered_after_their_event_is_durable() -> None:
    for flush in ("async", "sync"):
        node = Node(flush=flush)
        for number in range(4):
            node.send("orders", b"%d" % number)
        consumer = node.attach("orders", "g", delivery="at_most_once")
        node.sync()
        pulled = Pulled()
        node.broker.pull(consumer, 2, 1 << 20, 0, pulled.answer)
        node.commit()
        assert not pulled.answered
        early = node.power_lost()
        assert early.pull(early.attach("orders", "g", "x", delivery="at_most_once"), 1).bodies == [b"0"]
        work = node.broker.turn.begin_sync()
        work.run()
        assert not pulled.answered
        node.broker.turn.end_sync(work)
        assert pulled.bodies == [b"0", b"1"]
        for again in (node.power_lost(), node.killed()):
            rest = again.pull(again.attach("orders", "g", "x", delivery="at_most_once"))
            assert rest.bodies == [b"2", b"3"]


# --- R13 ----------------------------------------------------------------------------------------


def r13_rows_that_a_client_reports_as_held_are_not_redelivered() -> None:
    node = Node(flush="sync")
    for number in range(10):
        node.send("orders", b"%d" % number)
    consumer = node.attach("orders", "g")
    node.pull(consumer, 8)
    epoch = node.broker.turn.epoch
    node.ack(consumer, (0, 2))
    node.membership.disconnected(consumer, consumer.session)
    # Rows 2 to 4 are in flight; the reply with 5 to 7 never arrived.
    node.attach("orders", "g", holds=[(2, 5, epoch)])
    assert node.pull(consumer).ranges == [(5, 8, 2), (8, 10, 1)]
    assert consumer.group.redelivered_count == 3
    for again in (node.killed(), node.power_lost()):
        back = again.attach("orders", "g", holds=[(2, 4, epoch), (6, 7, epoch)])
        assert [row.sequence for row in again.pull(back).rows] == [4, 5, 7, 8, 9]
        again.ack(back, (2, 4, epoch), (6, 7, epoch))
        assert again.group("orders", "g").cursor.held_count == 5


def r13_a_reported_hold_that_the_broker_forgot_is_accepted() -> None:
    node = Node(flush="async")
    for number in range(6):
        node.send("orders", b"%d" % number)
    consumer = node.attach("orders", "g")
    node.sync()
    node.pull(consumer, 4)
    again = node.power_lost()
    back = again.attach("orders", "g", holds=[(0, 4, node.broker.turn.epoch)])
    assert again.pull(back).ranges == [(4, 6, 1)]


# --- R18 ----------------------------------------------------------------------------------------


def r18_damage_is_reported_and_skipped_and_a_torn_tail_is_cut_and_saved() -> None:
    node = Node(flush="sync")
    sends = [node.send("orders", b"message %d " % number * 20) for number in range(5)]
    records = [node.partition("orders").consume_log.record(number) for number in range(5)]
    torn = node.submit(Producer(9).frame("orders", b"torn " * 100))
    node.commit()
    path = "message/00000000000000000000.log"
    end = records[4].offset + records[4].size
    node.disk.flip_bit(path, records[2].offset + 120, 3)
    rotten = node.disk.read(path)
    cut = node.disk.copy()
    cut.open(path).write([bytes(4096)], end + 200)
    again = Node(cut, node.clock, node.config)
    damages = [(damage.offset, damage.kind) for damage in again.report.damages]
    assert damages == [(records[2].offset, "damaged"), (end, "torn")]
    assert [row.sequence for row in again.stored("orders")] == [0, 1, 3, 4]
    now = cut.read(path)
    assert now[:end] == rotten[:end], "damage stays in place"
    assert not any(now[end:]), "a torn tail is cut"
    kept = b"".join(cut.read(f"{QUARANTINE}/{name}") for name in cut.list(QUARANTINE))
    assert rotten[end : end + 200] in kept
    assert rotten[records[2].offset : records[3].offset] in kept
    consumer = again.attach("orders", "g")
    assert [r[:2] for r in again.pull(consumer).ranges] == [(0, 2), (3, 5)]
    assert again.group("orders", "g").lost_count == 1
    resent = again.submit(Sent("orders", torn.data, torn.bodies))
    again.turn()
    assert resent.sequence == 5
    assert [sent.acknowledged for sent in sends] == [True] * 5


def r18_the_rest_of_a_turn_after_a_power_loss_is_not_damage() -> None:
    """Frames after a missing one were never acknowledged; if they were kept, the resent frame would follow them."""
    for seed in range(30):
        node = Node(flush="sync")
        producer = Producer(7)
        node.send("orders", b"first", producer=producer)
        sends = [
            node.submit(producer.frame("orders", b"%d " % number * 300, **({"send_time": 5} if number % 2 else {})))
            for number in range(4)
        ]
        node.commit()
        again = node.power_lost("random", random.Random(seed))
        assert all(damage.kind == "torn" for damage in again.report.damages)
        for sent in sends:
            again.submit(Sent("orders", sent.data, sent.bodies))
        again.turn()
        numbers = [row.number for row in again.stored("orders")]
        assert numbers == [1, 2, 3, 4, 5]
        later = again.power_lost("random", random.Random(seed))
        assert [row.number for row in later.stored("orders")] == numbers


# --- the tests ----------------------------------------------------------------------------------

SCENARIOS: list[Callable[[], None]] = [
    r1_a_checkpoint_writes_only_what_changed,
    r1_a_cursor_is_one_sequence_and_its_exceptions,
    r2_only_acknowledged_rows_are_visible,
    r2_a_row_is_written_before_it_is_delivered,
    r3_events_that_depend_on_lost_messages_are_not_replayed,
    r3_a_dead_letter_without_its_copy_does_not_count,
    r3_every_unclean_start_opens_a_new_epoch,
    r7_a_refused_frame_is_not_overtaken,
    r7_runs_of_joined_frames_are_known_after_a_start,
    r7_other_rows_with_stored_producer_sequences_are_refused,
    r9_producers_are_remembered_and_after_a_time_forgotten_with_an_error,
    r10_an_ack_of_an_earlier_epoch_does_not_apply_to_other_messages,
    r12_at_most_once_rows_are_delivered_after_their_event_is_durable,
    r13_rows_that_a_client_reports_as_held_are_not_redelivered,
    r13_a_reported_hold_that_the_broker_forgot_is_accepted,
    r18_damage_is_reported_and_skipped_and_a_torn_tail_is_cut_and_saved,
    r18_the_rest_of_a_turn_after_a_power_loss_is_not_damage,
    r21_the_start_moves_and_an_overtaken_group_can_see_it,
    r21_rows_that_a_group_holds_outlast_retention,
    r21_both_logs_are_kept_from_the_oldest_checkpoint_on,
    r21_a_segment_is_deleted_when_all_its_partitions_allow,
]


DEFECTS: list[tuple[Callable[[], None], Callable[[pytest.MonkeyPatch], None]]] = [
    (r1_a_checkpoint_writes_only_what_changed, defects.touch_everything),
    (r1_a_cursor_is_one_sequence_and_its_exceptions, defects.remember_every_sequence),
    (r2_only_acknowledged_rows_are_visible, defects.finish_before_the_sync),
    (r2_a_row_is_written_before_it_is_delivered, defects.write_messages_last),
    (r3_events_that_depend_on_lost_messages_are_not_replayed, defects.presume_nothing),
    (r3_a_dead_letter_without_its_copy_does_not_count, defects.presume_nothing_kept),
    (r3_every_unclean_start_opens_a_new_epoch, defects.take_a_lost_life_for_a_clean_stop),
    (r7_a_refused_frame_is_not_overtaken, defects.store_whatever_is_newer),
    (r7_runs_of_joined_frames_are_known_after_a_start, defects.forget_runs),
    (r7_other_rows_with_stored_producer_sequences_are_refused, defects.believe_numbers_alone),
    (r9_producers_are_remembered_and_after_a_time_forgotten_with_an_error, defects.forget_producers_with_the_process),
    (r9_producers_are_remembered_and_after_a_time_forgotten_with_an_error, defects.take_unknown_producers_for_new),
    (r10_an_ack_of_an_earlier_epoch_does_not_apply_to_other_messages, defects.believe_any_epoch),
    (r12_at_most_once_rows_are_delivered_after_their_event_is_durable, defects.hand_out_at_once),
    (r13_rows_that_a_client_reports_as_held_are_not_redelivered, defects.ignore_holds),
    (r13_a_reported_hold_that_the_broker_forgot_is_accepted, defects.ignore_holds),
    (r18_damage_is_reported_and_skipped_and_a_torn_tail_is_cut_and_saved, defects.cut_at_the_first_bad_frame),
    (r18_damage_is_reported_and_skipped_and_a_torn_tail_is_cut_and_saved, defects.keep_nothing_aside),
    (r18_damage_is_reported_and_skipped_and_a_torn_tail_is_cut_and_saved, defects.leave_the_torn_tail),
    (r18_the_rest_of_a_turn_after_a_power_loss_is_not_damage, defects.believe_frames_behind_missing_ones),
    (r21_the_start_moves_and_an_overtaken_group_can_see_it, defects.expire_silently),
    (r21_rows_that_a_group_holds_outlast_retention, defects.keep_nothing),
    (r21_both_logs_are_kept_from_the_oldest_checkpoint_on, defects.delete_what_checkpoints_need),
    (r21_a_segment_is_deleted_when_all_its_partitions_allow, defects.ask_only_the_shortest_subject),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_rule_holds(scenario: Callable[[], None]):
    scenario()


@pytest.mark.parametrize(("scenario", "defect"), DEFECTS, ids=lambda function: function.__name__)
def test_without_the_rule_its_scenario_fails(
    scenario: Callable[[], None], defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    defect(monkeypatch)
    with pytest.raises(AssertionError):
        scenario()


def test_every_scenario_is_known_to_fail_without_its_rule():
    assert {scenario for scenario, _ in DEFECTS} == set(SCENARIOS)
