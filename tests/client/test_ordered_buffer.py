"""The buffer of an ordered consumer: hands out each row once, and the rows of a key in order, one batch at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.client.consume.ack_collector import AckCollector
from plait.client.consume.delivered import Piece, flat
from plait.client.consume.failure import UNBEGUN, FailureOutcome
from plait.client.consume.ordered.failed_keys import KeyHolds
from plait.client.consume.ordered.ordered_buffer import OrderedBuffer
from plait.client.consume.ordered.ordered_delivered import LockRights, OrderedDelivered
from plait.client.types import Message, PartitionName
from plait.clock import ManualClock
from plait.limits import ClientLimits
from plait.model.logical_partitions import NO_KEY_HASH, lp_set
from plait.wire import messages as m
from tests.frame.samples import Draft

NO_END = np.zeros(1024, np.int64)
PLACE = PartitionName("s", "g1")
#: Hashes of keys that differ above the bits of the logical partition.
KEYS = [int(NO_KEY_HASH), *(n << 10 | n for n in range(1, 6))]


class Bench:
    """A buffer with its lock rights and pending outcomes, without a broker."""

    def __init__(self, *, strict: bool = False) -> None:
        self.clock = ManualClock()
        self.rights = LockRights(self.clock)
        self.rights.attached(m.AttachReply(1, 1, "s", "g", 1, 10.0))
        everything = lp_set([(0, 1024)])
        self.rights.granted(
            m.LeaseReply(10.0, 1, [(0, 1024, 5)]), self.clock.monotonic(), everything, NO_END, everything
        )
        self.freed = 0
        self.buffer = OrderedBuffer(self._free, [None])
        self.collector = AckCollector(None, ClientLimits())  # type: ignore[arg-type]
        self.deliveries, self.gather = self.collector.deliveries, self.collector.gather
        # The outcomes are collected when the test gathers them.
        self.deliveries.loop, self.deliveries.scheduled = object(), True  # type: ignore[assignment]
        self.pending = self.collector.pending
        self.pending.holds = KeyHolds(self.deliveries, lambda: 0)
        self.pending.holds.strict = self.buffer.strict = strict
        self.next = 0

    def _free(self) -> None:
        self.freed += 1

    def other_partition(self, lps: tuple[int, int]) -> LockRights:
        """Locks that the consumer has on another partition."""
        rights = LockRights(self.clock)
        rights.attached(m.AttachReply(2, 2, "s", "g", 1, 10.0))
        some = lp_set([lps])
        rights.granted(m.LeaseReply(10.0, 1, [(*lps, 5)]), self.clock.monotonic(), some, NO_END, some)
        return rights

    def arrive(
        self, hashes: list[int], *, base: int | None = None, tag: int = 1, rights: LockRights | None = None
    ) -> OrderedDelivered:
        """Deliver a frame with rows of these keys."""
        start = self.next if base is None else base
        bodies = [b"%d" % n for n in range(start, start + len(hashes))]
        view = Draft(bodies, keys=[b"k"] * len(hashes), key_hashes=hashes, base=start).view()
        delivered = OrderedDelivered(view, "s", PLACE, self.deliveries, [(start, start + len(hashes), 1)])
        delivered.rights, delivered.tracker, delivered.tag = rights or self.rights, self.buffer, tag
        self.next = max(self.next, start + len(hashes))
        self.deliveries.add(delivered)
        self.buffer.append(delivered)
        return delivered

    def ack(self, session: int) -> m.AckRequest:
        return m.AckRequest(session, *flat(self.pending.acks))


def report(pieces: list[Piece], failed: FailureOutcome | None) -> None:
    for delivered, start, stop in pieces:
        delivered.report_rows(slice(start, stop), failed)


def numbers(pieces: list[Piece]) -> list[int]:
    return [int(message.body) for d, start, stop in pieces for message in d.messages(start, stop)]


def take(bench: Bench) -> int | None:
    message = bench.buffer.next()
    return None if message is None else int(message.body)


A, B = KEYS[1], KEYS[2]


def test_a_strict_batch_has_the_rows_of_a_key_from_one_partition_only() -> None:
    """If an older partition has rows again, rows behind a failed one are redelivered only by their own partition."""
    bench = Bench(strict=True)
    bench.arrive([A, B, A])
    bench.arrive([A, KEYS[3], B, int(NO_KEY_HASH)], rights=bench.other_partition((0, 1024)))
    bench.arrive([A, B])
    first = bench.buffer.take(10)
    assert numbers(first) == [0, 1, 2, 4, 6, 7, 8]
    report(first, None)
    bench.gather()
    assert numbers(bench.buffer.take(10)) == [3, 5]


def test_iteration_skips_held_keys_and_returns_to_them() -> None:
    bench = Bench()
    bench.arrive([A, A, B, A, B])
    first, second = bench.buffer.next(), bench.buffer.next()
    assert first is not None
    assert second is not None
    assert (first.body, second.body) == (b"0", b"2")
    assert bench.buffer.next() is None
    first.ack()
    assert bench.freed == 1
    assert take(bench) == 1
    bench.arrive([A, KEYS[3]])
    assert take(bench) == 6
    assert bench.buffer.next() is None
    second.ack()
    assert take(bench) == 4
    assert bench.buffer.count == 2


def test_a_second_ack_of_a_row_is_ignored() -> None:
    bench = Bench()
    bench.arrive([A, A, A])
    message = bench.buffer.next()
    assert message is not None
    message.ack()
    assert take(bench) == 1
    message.ack()
    assert bench.buffer.next() is None


def test_an_ack_after_a_nack_does_not_release_the_key() -> None:
    bench = Bench(strict=True)
    bench.arrive([A, A])
    message = bench.buffer.next()
    assert message is not None
    message.nack()
    message.ack()
    assert bench.buffer.next() is None
    bench.gather()
    assert (bench.buffer.next(), bench.buffer.count) == (None, 0)


def test_rows_that_are_put_back_keep_their_position() -> None:
    bench = Bench()
    bench.arrive([A, B])
    bench.arrive([A, B])
    taken = bench.buffer.take(3)
    assert bench.buffer.count == 1
    bench.buffer.put_back(taken)
    assert bench.buffer.count == 4
    assert numbers(bench.buffer.take(10)) == [0, 1, 2, 3]


def test_an_expired_lease_hides_its_rows_until_it_is_renewed() -> None:
    bench = Bench()
    bench.arrive([A, B])
    bench.clock.advance(10)
    assert (bench.buffer.available(), bench.buffer.take(5), bench.buffer.next()) == (0, [], None)
    bench.rights.renewed(1, bench.clock.monotonic())
    bench.buffer.start_over()
    assert (bench.buffer.available(), take(bench)) == (2, 0)


def test_a_lease_renewed_between_two_checks_keeps_the_order_of_rows() -> None:
    bench = Bench()
    bench.arrive([A, B])
    bench.arrive([A, B])
    bench.clock.advance(10)
    looks = iter([False, True, True, True, True, True])
    bench.rights.valid = lambda: next(looks)  # type: ignore[method-assign]
    assert take(bench) == 0
    looks = iter([True, False, True, True])
    bench.buffer.start_over()
    assert numbers(bench.buffer.take(1)) == [1]


def test_only_rows_of_lost_logical_partitions_are_taken_back() -> None:
    bench = Bench()
    bench.arrive([A, B, A])
    pieces = bench.buffer.take_back(PLACE, lp_set([(A % 1024, A % 1024 + 1)]))
    assert numbers(pieces) == [0, 2]
    report(pieces, UNBEGUN)
    bench.gather()
    assert (bench.buffer.count, take(bench)) == (1, 1)


def test_the_oldest_held_row_counts_from_when_it_was_handed_out() -> None:
    bench = Bench()
    assert bench.buffer.held.oldest() is None
    bench.arrive([A, B])
    began = bench.clock.monotonic()
    first = bench.buffer.next()
    bench.clock.advance(5)
    second = bench.buffer.next()
    assert first is not None
    assert second is not None
    assert bench.buffer.held.oldest() == began
    first.ack()
    assert bench.buffer.held.oldest() == began + 5
    second.ack()
    assert bench.buffer.held.oldest() is None


def test_a_message_has_the_epoch_of_its_lock_when_it_is_handed_out() -> None:
    bench = Bench()
    bench.arrive([A, A])
    first = bench.buffer.next()
    assert first is not None
    first.ack()
    everything = lp_set([(0, 1024)])
    bench.rights.granted(m.LeaseReply(10.0, 2, [(0, 1024, 6)]), bench.clock.monotonic(), everything, NO_END, everything)
    second = bench.buffer.next()
    assert second is not None
    assert (first.epoch, second.epoch) == (5, 6)


def test_a_row_may_begin_only_while_its_lock_is_held() -> None:
    bench = Bench()
    delivered = bench.arrive([A, B])
    bench.buffer.take(2)
    assert delivered.may_begin(slice(0, 2))
    bench.rights.give_up(lp_set([(B % 1024, B % 1024 + 1)]))
    assert (delivered.may_begin(0), delivered.may_begin(1), delivered.may_begin(slice(0, 2))) == (True, False, False)
    bench.clock.advance(10)
    assert not delivered.may_begin(0)


def test_acks_of_neighbouring_rows_of_a_frame_make_one_range_across_gaps() -> None:
    bench = Bench()
    delivered = bench.arrive([A, B, A])
    # As if another consumer owned every other row of the log.
    delivered.sequences = np.array([0, 2, 4])
    report(bench.buffer.take(2), None)
    bench.gather()
    assert bench.ack(1) == m.AckRequest(1, [(0, 4, 2)], [1])


def test_acks_for_a_frame_of_an_earlier_session_name_only_their_rows() -> None:
    bench = Bench()
    delivered = bench.arrive([A, B, A])
    message = bench.buffer.next()
    assert message is not None
    message.ack()
    bench.gather()
    bench.pending.new_session()
    delivered.tag = 0
    report(bench.buffer.take(2), None)
    bench.gather()
    assert bench.ack(2) == m.AckRequest(2, [(0, 3, 2)])


@pytest.mark.parametrize("strict", [False, True])
def test_a_failed_row_returns_the_later_rows_of_its_key_only_if_strict(strict: bool) -> None:
    bench = Bench(strict=strict)
    bench.arrive([A, B, A, A])
    bench.arrive([A, B])
    batch = bench.buffer.take(3)
    [(delivered, _, _)] = batch
    delivered.report_row(0, FailureOutcome(5.0))
    report(batch, None)
    bench.gather()
    acks, nacks = bench.pending.plain()
    back = {UNBEGUN: [(2, 4, 2), (4, 5, 2)]} if strict else {}
    assert nacks == {FailureOutcome(5.0): [(0, 1, 2)], **back}
    assert acks == ([(1, 2, 2)] if strict else [(1, 3, 2)])
    assert numbers(bench.buffer.take(10)) == ([5] if strict else [3, 4, 5])


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.lists(st.sampled_from(KEYS), min_size=1, max_size=6)),
        st.tuples(st.just("take"), st.integers(1, 8)),
        st.tuples(st.just("apart"), st.integers(1, 8)),
        st.tuples(st.just("next"), st.just(0)),
        st.tuples(st.just("ack"), st.integers(0, 20)),
        st.tuples(st.just("ack all"), st.just(0)),
        st.tuples(st.just("gather"), st.just(0)),
    ),
    max_size=60,
)


@given(STEPS)
def test_each_row_is_handed_out_once_and_after_the_earlier_rows_of_its_key(steps: list[tuple[str, Any]]) -> None:
    bench = Bench()
    keys: list[int] = []
    handed: list[int] = []
    #: (batch number, message) of each held message.
    held: list[tuple[int, Message]] = []

    def hand(number: int, messages: list[Message]) -> None:
        for message in messages:
            row = int(message.body)
            key = keys[row]
            if key != KEYS[0]:
                assert [n for n in handed if keys[n] == key] == [n for n in range(row) if keys[n] == key]
                assert not [other for batch, other in held if batch != number and keys[int(other.body)] == key]
            assert row not in handed
            handed.append(row)
            held.append((number, message))

    for number, (step, value) in enumerate(steps):
        if step == "arrive":
            keys += value
            bench.arrive(value)
        elif step == "take":
            free = bench.buffer.available()
            pieces = bench.buffer.take(value)
            hand(number, [message for d, a, b in pieces for message in d.messages(a, b)])
            assert sum(b - a for _, a, b in pieces) == min(free, value)
        elif step == "apart":
            messages = [message for d, a, b in bench.buffer.take(value, apart=True) for message in d.messages(a, b)]
            known = [keys[int(message.body)] for message in messages if keys[int(message.body)] != KEYS[0]]
            assert len(known) == len(set(known))
            hand(number, messages)
        elif step == "next":
            found = bench.buffer.next()
            if found is not None:
                hand(number, [found])
            else:
                busy = {keys[int(message.body)] for _, message in held}
                assert all(keys[n] in busy for n in range(len(keys)) if n not in handed)
        elif step == "ack" and held:
            held.pop(value % len(held))[1].ack()
        elif step == "ack all":
            for _, message in held:
                message.ack()
            held.clear()
        else:
            bench.gather()
        assert bench.buffer.count == len(keys) - len(handed)
    for _, message in held:
        message.ack()
    held.clear()
    hand(-1, [message for d, a, b in bench.buffer.take(len(keys) + 1) for message in d.messages(a, b)])
    assert sorted(handed) == list(range(len(keys)))


def test_half_of_a_frame_is_returned_in_one_range_and_then_the_rest_is_acked_in_one() -> None:
    bench = Bench()
    frame = bench.arrive([A, B] * 32)
    report(bench.buffer.take_back(lps=lp_set([(1, 2)])), UNBEGUN)
    bench.gather()
    report(bench.buffer.take(64), None)
    bench.gather()
    nack = bench.pending.nack(1, UNBEGUN)
    assert (nack.ranges, nack.lps, nack.lp_ranges, nack.lp_tags) == ([], [(1, 2)], [(0, 64, frame.epoch)], [1])
    early, *_ = acks = bench.ack(1).ranges
    assert (len(acks), early) == (32, (1, 2, frame.epoch))
    bench.pending.confirm(UNBEGUN)
    assert bench.ack(1) == m.AckRequest(1, [(0, 64, frame.epoch)], [1])
    # In another session the ranges cover only the acked rows.
    bench.pending.new_session()
    assert len(bench.ack(1).ranges) == 32
