"""Limits of sends and of groups at one broker, on a manual clock: the rate that is reached, and what goes with it."""

from __future__ import annotations

from typing import Any

import pytest

from plait.broker.groups.group import AttachedConsumer
from plait.broker.groups.group_settings import GroupFilter
from plait.broker.partition_rate import PartitionRate
from plait.broker.partitions.sealing import open_lps, seal
from plait.broker.partitions.settings import share_of
from plait.errors import InvalidArgument, LimitExceeded, OutOfSequence, RateLimited
from plait.limits import LIMITED_GROUPS_MAX, RATE_STEP_SECONDS
from plait.model.filter_terms import filter_terms
from plait.model.rate import Rate
from plait.model.retry_policy import Retry
from plait.model.settings import SubjectSettings, with_pause, with_rate
from tests.broker.ordered_node import GROUP, SUBJECT, Owner, keyed, make_subject
from tests.broker.rate_model import RateModel
from tests.support.broker_node import Node, Producer

RETRY = Retry(steps=(2.0,), jitter=0)


def limit(node: Node, group: str | None, messages: float | None, size: float | None = None, subject: str = "s") -> None:
    """Set the rate of a group, or of sends."""
    changed = with_rate(node.partition(subject).row.settings, group, Rate(messages, size))
    node.broker.catalog.update_subject(subject, changed)
    node.turn()


def until_next(node: Node) -> None:
    """Let time pass until the broker's next timer."""
    due = node.broker.next_deadline
    assert due is not None
    node.later(max(due - node.clock.monotonic(), 0.0))


def delivered(node: Node, consumer: AttachedConsumer, seconds: float, count: int = 1000) -> list[bytes]:
    """What a consumer that pulls again and again, and acks at once, gets in this time."""
    end, bodies = node.clock.monotonic() + seconds, []
    while node.clock.monotonic() < end:
        pulled = node.pull(consumer, count, wait=30)
        while not pulled.answered and node.clock.monotonic() < end:
            until_next(node)
        if pulled.answered:
            bodies += pulled.bodies
            node.ack(consumer, *(piece[:2] for piece in pulled.ranges))
        node.contact(consumer)
    return bodies


def numbered(node: Node, count: int, frame: int = 10) -> list[bytes]:
    bodies = [b"%04d" % number for number in range(count)]
    for first in range(0, count, frame):
        node.send("s", *bodies[first : first + frame])
    return bodies


# --- the buckets ----------------------------------------------------------------------------------


def test_a_limit_gives_its_rate_over_time_and_saves_one_second():
    bucket = PartitionRate(Rate(100), 1.0)
    assert bucket.pause(5.0) == RATE_STEP_SECONDS
    assert bucket.pause(6.0) == 0.0
    bucket.spend(400, 0)
    # A debt of 300, as it had saved 100.
    assert bucket.pause(6.0) == pytest.approx(3.0 + RATE_STEP_SECONDS)
    assert bucket.pause(9.0) == pytest.approx(RATE_STEP_SECONDS)
    assert bucket.pause(9.0 + RATE_STEP_SECONDS) == 0.0
    bucket.pause(100.0)
    assert bucket.messages is not None
    assert bucket.messages.room == 100


def test_a_limit_below_one_message_a_second_lets_single_messages_pass():
    bucket, now, count = PartitionRate(Rate(0.25), 1.0), 0.0, 0
    while now < 1000:
        pause = bucket.pause(now)
        if pause:
            now += pause
        else:
            count += 1
            bucket.spend(1, 1)
    assert count == pytest.approx(250, abs=2)


def test_both_limits_hold():
    bucket, now, sizes = PartitionRate(Rate(1000, 2048), 0.5), 0.0, []
    while now < 20:
        pause = bucket.pause(now)
        now += pause
        if not pause:
            sizes.append(64)
            bucket.spend(1, 64)
    assert sum(sizes) == pytest.approx(20 * 1024, rel=0.05)


@pytest.mark.parametrize("value", [0, -1, 1e13, "10", True, float("nan")])
def test_a_rate_out_of_range_is_refused(value: Any):
    with pytest.raises(InvalidArgument, match="messages_per_second is"):
        Rate(value)
    with pytest.raises(InvalidArgument, match="bytes_per_second is"):
        Rate(None, value)


def test_the_number_of_limited_groups_is_limited():
    settings = SubjectSettings(group_rates={f"g{number}": Rate(5) for number in range(LIMITED_GROUPS_MAX)})
    assert with_rate(settings, "g5", Rate(6)).group_rates["g5"] == Rate(6)
    with pytest.raises(LimitExceeded, match="1000 groups of the subject have a rate"):
        with_rate(settings, "more", Rate(5))
    assert len(with_rate(settings, "g5", Rate()).group_rates) == LIMITED_GROUPS_MAX - 1


# --- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"delivery": "at_most_once"}, {"retry": RETRY}, {"client": "b", "group": None}], ids=str
)
def test_a_group_gets_its_rate_of_messages(settings: dict[str, Any]):
    node = Node()
    bodies = numbered(node, 1500, frame=50)
    consumer = node.attach("s", **{"group": "g", "start": "earliest", **settings})
    limit(node, consumer.group.name, 100)
    got = delivered(node, consumer, 10.0)
    assert len(got) == pytest.approx(1000, rel=0.05)
    assert got == bodies[: len(got)]


def test_a_group_gets_its_rate_of_bytes():
    node = Node()
    for _ in range(300):
        node.send("s", b"x" * 1000)
    size = node.partition("s").size // 300
    consumer = node.attach("s", "g")
    limit(node, "g", None, 20 * size)
    assert len(delivered(node, consumer, 10.0)) == pytest.approx(200, rel=0.05)


@pytest.mark.parametrize("order", ["strict", "best_tried"])
def test_an_ordered_group_gets_its_rate_in_order(order: str):
    node, producer = Node(), Producer(5)
    make_subject(node, order)
    rows = [(f"k{number % 7}", b"%04d" % number) for number in range(1200)]
    for first in range(0, 1200, 20):
        keyed(node, producer, rows[first : first + 20])
    owner = Owner(node, "c1")
    owner.lease([(0, 1024, 1)])
    limit(node, GROUP, 100, subject=SUBJECT)
    begun, got = node.clock.monotonic(), []
    while node.clock.monotonic() < begun + 10:
        node.later(0.5)
        owner.lease()
        while found := owner.pull(7):
            got += [row.body for row in found]
            for row in list(owner.rows):
                assert owner.ack(row)
    assert len(got) == pytest.approx(1000, rel=0.05)
    for key in range(7):
        mine = [body for body in got if int(body) % 7 == key]
        assert mine == sorted(mine)


def test_a_suspended_pull_waits_for_the_timer_and_others_are_not_affected():
    node = Node()
    numbered(node, 30)
    first, second, other = node.attach("s", "g", "c1"), node.attach("s", "g", "c2"), node.attach("s", "h")
    limit(node, "g", 10)
    pulls = [node.pull(first, 3, wait=30), node.pull(second, 3, wait=30)]
    assert [pull.answered for pull in pulls] == [False, False]
    assert len(node.pull(other).bodies) == 30
    # Each gets one message, as there is a part of one at a time.
    until_next(node)
    assert [pull.answered for pull in pulls] == [True, False]
    until_next(node)
    assert [len(pull.bodies) for pull in pulls] == [1, 1]
    # Acks, and timers without a pull, need no tokens.
    assert node.ack(first, (0, 1))
    until_next(node)
    assert node.pull(first, 5).bodies == [b"0002"]


def test_a_limit_that_is_changed_or_removed_takes_effect_at_once():
    node = Node()
    numbered(node, 200)
    consumer = node.attach("s", "g")
    limit(node, "g", 0.01)
    waiting = node.pull(consumer, wait=60)
    node.later(1.0)
    assert len(waiting.bodies) == 1
    waiting = node.pull(consumer, wait=60)
    limit(node, "g", 40)
    assert not waiting.answered
    node.later(RATE_STEP_SECONDS)
    assert len(waiting.bodies) == 2
    waiting = node.pull(consumer, wait=60)
    limit(node, "g", None)
    assert len(waiting.bodies) == 197
    assert node.group("s", "g").rate is None


def test_retries_count_too():
    node = Node()
    consumer = node.attach("s", "g", retry=Retry(steps=(0.01,), jitter=0, attempts=None))
    node.send("s", b"0", b"1")
    limit(node, "g", 10)
    begun, times = node.clock.monotonic(), 0
    while node.clock.monotonic() < begun + 10:
        pulled = node.pull(consumer, wait=30)
        while not pulled.answered:
            until_next(node)
        times += len(pulled.bodies)
        node.nack(consumer, *(piece[:2] for piece in pulled.ranges))
        node.contact(consumer)
    assert times == pytest.approx(100, rel=0.05)


def test_messages_that_a_filter_leaves_out_cost_nothing():
    node = Node()
    bodies = [b"%04d" % number for number in range(2000)]
    producer = Producer(7)
    consumer = node.attach("s", "g", wanted=GroupFilter(filter_terms("key = 'a'", None), True, 1))
    for first in range(0, 2000, 20):
        rows = [("b" if number else "a", body) for number, body in enumerate(bodies[first : first + 20])]
        assert keyed(node, producer, rows, "s").acknowledged
    limit(node, "g", 8)
    got = delivered(node, consumer, 10.0)
    assert len(got) == pytest.approx(80, abs=4)
    assert got == bodies[::20][: len(got)]


def test_a_paused_group_saves_one_second_and_a_resumed_one_keeps_its_limit():
    node = Node()
    numbered(node, 300)
    consumer = node.attach("s", "g")
    limit(node, "g", 10)
    waiting = node.pull(consumer, wait=30)

    def pause(now: int) -> None:
        node.broker.catalog.update_subject("s", with_pause(node.partition("s").row.settings, "g", now))
        node.turn()

    pause(1)
    assert waiting.bodies == []
    waiting = node.pull(consumer, wait=30)
    for _ in range(20):
        node.later(0.5)
        node.contact(consumer)
    assert not waiting.answered
    pause(0)
    # What it saved at most is what one second gives.
    assert len(waiting.bodies) == 10
    assert len(delivered(node, consumer, 10.0)) == pytest.approx(100, rel=0.05)


def test_a_rewound_group_keeps_its_limit():
    node = Node()
    bodies = numbered(node, 300)
    consumer = node.attach("s", "g")
    limit(node, "g", 20)
    assert len(delivered(node, consumer, 5.0)) == pytest.approx(100, abs=5)
    node.membership.detach(consumer)
    node.turn()
    node.membership.rewind("s", "g", "earliest", skipping=False, preview=False)
    got = delivered(node, node.attach("s", "g"), 10.0)
    assert len(got) == pytest.approx(200, abs=10)
    assert got == bodies[: len(got)]


@pytest.mark.parametrize("end", ["killed", "restart", "power_lost"])
def test_limits_outlast_restarts_which_give_no_burst(end: str):
    node = Node(flush="sync")
    numbered(node, 400, frame=40)
    node.attach("s", "g")
    limit(node, "g", 10)
    limit(node, None, 10)
    node.checkpoint()
    got, sent = 0, 0
    # 20 starts, each of a tenth of a second.
    for _ in range(20):
        node = getattr(node, end)()
        consumer, producer = node.attach("s", "g"), Producer(int(node.clock.monotonic() * 1000))
        got += len(node.pull(consumer).bodies)
        sent += node.send("s", b"x", producer=producer).acknowledged
        node.later(0.1)
        got += len(node.pull(consumer).bodies)
        sent += node.send("s", b"x", producer=Producer(producer.id + 1)).acknowledged
    assert (got, sent) == (20, 20)


def test_a_group_that_begins_in_a_limited_subject_is_limited():
    node = Node()
    node.broker.create_subject("s", SubjectSettings(group_rates={"g": Rate(5)}))
    numbered(node, 100)
    assert node.pull(node.attach("s", "g")).ranges == []
    assert len(node.pull(node.attach("s", "h")).bodies) == 100


# --- shares ---------------------------------------------------------------------------------------


def routed(node: Node, lps: list[tuple[int, int]], version: int = 1, rate: Rate | None = None) -> None:
    settings = SubjectSettings(send_rate=rate, group_rates={} if rate is None else {"g": rate})
    open_lps(node.broker, "s", "s", lps, version, settings)
    node.turn()


def test_a_partition_enforces_its_share():
    node = Node()
    routed(node, [(0, 256)], rate=Rate(40))
    partition = node.partition("s")
    assert partition.send_rate is not None
    assert partition.send_rate.share == 0.25
    routed(node, [(0, 512)], 2, Rate(40))
    assert partition.send_rate.share == 0.5
    consumer = node.attach("s", "g")
    sent = 0
    begun = node.clock.monotonic()
    while node.clock.monotonic() < begun + 10:
        node.later(0.1)
        sent += sum(node.send("s", b"x", producer=Producer(sent + 1000 + n)).acknowledged for n in range(4))
        node.contact(consumer)
    assert sent == pytest.approx(200, rel=0.05)
    assert len(delivered(node, consumer, 8.0)) == pytest.approx(160, rel=0.05)


def test_a_group_finishes_what_was_sealed_with_the_share_of_then():
    node = Node()
    routed(node, [(0, 512)])
    numbered(node, 500)
    consumer = node.attach("s", "g")
    limit(node, "g", 100)
    seal(node.broker, "s", [(0, 512)], 2, lambda *_: None)
    node.turn()
    group = node.group("s", "g")
    assert group.rate is not None
    got = delivered(node, consumer, 5.0)
    assert len(got) == pytest.approx(5 * 50, rel=0.05)
    assert len(delivered(node, consumer, 6.0)) == 500 - len(got)
    assert share_of(node.partition("s"), group) == 1 / 1024


# --- sends ----------------------------------------------------------------------------------------


def test_a_send_beyond_the_rate_is_refused_with_the_time_to_wait():
    node, producer = Node(), Producer(5)
    node.send("s", b"0", producer=producer)
    limit(node, None, 10)
    refused = node.send("s", b"1", producer=producer)
    assert isinstance(refused.error, RateLimited)
    assert refused.error.details == {"subject": "s", "seconds": RATE_STEP_SECONDS}
    # The next frame names the refused one, so it must not be stored before it.
    node.later(RATE_STEP_SECONDS)
    assert isinstance(node.send("s", b"2", producer=producer).error, OutOfSequence)
    again = producer_again(producer, 1)
    stored = node.submit(again.frame("s", b"1"))
    node.turn()
    assert stored.acknowledged
    # A resend of a stored frame gets its receipt, and costs nothing.
    resent = node.submit(producer_again(producer, 1).frame("s", b"1"))
    node.turn()
    assert (resent.acknowledged, resent.sequence) == (True, stored.sequence)
    assert isinstance(node.send("s", b"2", producer=again).error, RateLimited)
    assert node.bodies("s") == [b"0", b"1"]


def producer_again(producer: Producer, last: int) -> Producer:
    """The producer as it was after its row ``last``."""
    again = Producer(producer.id)
    again.next, again.last = last + 1, {"s": last}
    return again


def test_frames_of_one_turn_are_stored_up_to_the_rate():
    node = Node()
    node.send("s", b"0")
    limit(node, None, 40)
    node.send("s", b"refused", producer=Producer(9))
    node.later(RATE_STEP_SECONDS)
    sent = [node.submit(Producer(number).frame("s", b"x")) for number in range(10, 15)]
    node.turn()
    assert [each.acknowledged for each in sent] == [True, True, False, False, False]


def test_oneway_sends_beyond_the_rate_are_dropped():
    node, producer = Node(), Producer(5)
    node.send("s", b"0")
    limit(node, None, 1)
    for body in (b"1", b"2", b"3"):
        node.broker.submit(node.partition("s"), producer.oneway("s", body).view, None)
        node.turn()
        node.later(0.3)
    assert node.bodies("s") == [b"0", b"2"]


def test_a_rate_of_bytes_counts_whole_frames():
    node = Node()
    node.send("s", b"0")
    limit(node, None, None, 10_000)
    begun, sent, number = node.clock.monotonic(), 0, 100
    while node.clock.monotonic() < begun + 10:
        frame = Producer(number).frame("s", b"x" * 400)
        if node.submit(frame) and not node.turn() and frame.acknowledged:
            sent += len(frame.data)
        else:
            node.later(frame.error.details["seconds"])
        number += 1
    assert sent == pytest.approx(100_000, rel=0.05)


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_a_model_of_limits_with_crashes(first: int):
    for seed in range(first, first + 10):
        RateModel(seed).run(100)
