"""Ordered groups on a broker: locks, cursors, failures that hold one key, parking."""

from __future__ import annotations

import pytest

from plait.broker.partitions import sealing
from plait.broker.partitions.frame_search import keys_in
from plait.errors import GroupMismatch, InvalidArgument, StaleRoute
from plait.model.logical_partitions import lp_of_key
from plait.model.retry_policy import Retry
from plait.model.settings import SubjectSettings
from tests.broker.ordered_node import GROUP, NEWEST, SUBJECT, Owner, keyed, make_subject
from tests.support.broker_node import Node, Producer, Sent

ALL = [(0, 1024, 1)]


def bodies(rows: list) -> list[bytes]:
    return [row.body for row in rows]


def node_with(order: str = "strict", **settings: object) -> Node:
    node = Node(**settings)
    make_subject(node, order)
    return node


def halves(epoch: int = 1) -> tuple[list, list]:
    return [(0, 512, epoch)], [(512, 1024, epoch)]


def keys_by_half() -> tuple[str, str]:
    low = next(f"k{i}" for i in range(1000) if lp_of_key(f"k{i}") < 512)
    high = next(f"k{i}" for i in range(1000) if lp_of_key(f"k{i}") >= 512)
    return low, high


def test_new_rows_wake_the_suspended_pulls_of_their_owners():
    node = node_with()
    low, high = keys_by_half()
    one, two = Owner(node, "c1"), Owner(node, "c2")
    one.lease(halves()[0])
    two.lease(halves()[1])
    waiting = [node.pull(owner.consumer, wait=10) for owner in (one, two)]
    keyed(node, Producer(5), [(high, b"h")])
    assert [pulled.answered for pulled in waiting] == [False, True]
    keyed(node, Producer(6), [(low, b"l")])
    assert [pulled.bodies for pulled in waiting] == [[b"l"], [b"h"]]


def test_rows_without_keys_are_shared_by_all_owners_and_delivered_once():
    node = node_with()
    producer = Producer(5)
    for number in range(40):
        node.submit(producer.frame(SUBJECT, *(b"%d-%d" % (number, row) for row in range(50))))
        node.turn()
    one, two = Owner(node, "c1"), Owner(node, "c2")
    one.lease(halves()[0])
    two.lease(halves()[1])
    got = bodies(one.pull(10_000)), bodies(two.pull(10_000))
    assert all(got)
    assert sorted(got[0] + got[1]) == sorted(node.bodies(SUBJECT))


def test_a_lock_changes_its_owner_only_when_the_old_one_holds_no_rows():
    node = node_with()
    keyed(node, Producer(5), [("a", b"1"), ("a", b"2")])
    old, new = Owner(node, "c1"), Owner(node, "c2")
    old.lease(ALL)
    first, second = old.pull()
    news = old.consumer.news
    assert new.lease([(0, 1024, 2)]).owned != [(0, 1024, 2)]
    assert old.consumer.news > news
    assert new.pull() == []
    # The old owner still owns the lock of the key; the new one owns all others.
    lp = lp_of_key("a")
    old.rows.remove(second)
    rows = [first]
    leased = node.broker.leases.ask(old.consumer, old.wants, [], [], NEWEST)
    assert leased.leaving == [(lp, lp + 1)]
    old.give_back([second])
    assert new.pull() == []
    old.rows = rows
    old.ack(first)
    new.lease()
    assert new.leased is not None
    assert new.leased.owned == [(0, 1024, 2)]
    assert bodies(new.pull()) == [b"2"]


def test_an_owner_that_is_silent_past_its_lease_loses_its_locks_and_its_acks_are_ignored():
    node = node_with()
    keyed(node, Producer(5), [("a", b"1"), ("a", b"2")])
    old = Owner(node, "c1")
    old.lease(ALL)
    rows = old.pull()
    node.clock.advance(node.broker.leases.seconds)
    assert node.membership.lose_silent() == []
    new = Owner(node, "c2")
    assert new.lease([(0, 1024, 2)]).owned != [(0, 1024, 2)]
    node.clock.advance(node.broker.leases.longest - node.broker.leases.seconds)
    assert [consumer.client for consumer, _ in node.membership.lose_silent()] == ["c1"]
    node.turn()
    assert new.lease().owned == [(0, 1024, 2)]
    old.ack(*rows)
    assert [(row.body, row.attempt) for row in new.pull()] == [(b"1", 2), (b"2", 2)]


def test_a_lower_epoch_is_refused():
    node = node_with()
    new, old = Owner(node, "c2"), Owner(node, "c1")
    new.lease([(0, 1024, 5)])
    leased = old.lease([(0, 1024, 4)])
    assert (leased.owned, leased.refused) == ([], [(0, 1024, 5)])
    new.lease([])
    assert old.lease().refused == [(0, 1024, 5)]


def test_after_a_restart_the_owner_continues_and_no_other_gets_its_locks_within_a_lease():
    node = node_with()
    keyed(node, Producer(5), [("a", b"1"), ("a", b"2")])
    old = Owner(node, "c1")
    old.lease(ALL)
    old.pull()
    again = node.killed()
    new = Owner(again, "c2")
    assert new.lease([(0, 1024, 2)]).owned == []
    old.node = again
    old.attach()
    assert old.lease([(0, 1024, 1)]).owned != ALL
    # It keeps the locks of the rows that it holds until it acks them.
    old.ack(*old.rows) if old.rows else None
    again.clock.advance(again.broker.leases.longest)
    again.broker.leases.look()
    assert new.lease().owned == [(0, 1024, 2)]


def test_floors_fence_out_epochs_that_a_power_loss_removed_from_the_log():
    node = node_with()
    node.broker.turn.floors.awaited = True
    owner = Owner(node, "c1")
    assert owner.lease([(0, 1024, 5)]).owned == []
    node.broker.leases.set_floors({(SUBJECT, GROUP): [(0, 1024, 7)]})
    assert owner.lease([(0, 1024, 6)]).owned == []
    assert owner.lease([(0, 1024, 7)]).owned == [(0, 1024, 7)]


def test_a_failed_message_of_a_strict_subject_holds_back_only_its_key():
    node = node_with()
    producer = Producer(5)
    keyed(node, producer, [("a", b"a1"), ("b", b"b1"), ("a", b"a2"), ("b", b"b2")])
    owner = Owner(node, "c1", retry=Retry(first=10, jitter=0))
    owner.lease(ALL)
    owner.pull()
    owner.nack(owner.first_of("a"), None)
    keyed(node, producer, [("a", b"a3"), ("b", b"b3")])
    assert bodies(owner.pull()) == [b"b3"]
    owner.ack(*[row for row in owner.rows if row.key == "b"])
    node.clock.advance(5)
    owner.lease()
    assert owner.pull() == []
    node.later(6)
    owner.lease()
    assert [(row.body, row.attempt) for row in owner.pull()] == [(b"a1", 2)]
    owner.ack(*owner.rows)
    assert bodies(owner.pull()) == [b"a2", b"a3"]
    owner.ack(*owner.rows)
    keyed(node, producer, [("a", b"a4"), ("b", b"b4")])
    assert bodies(owner.pull()) == [b"a4", b"b4"]
    owner.ack(*owner.rows)
    owner.pull()
    assert not owner.group.cursors.by_key


def test_a_failed_message_of_a_best_tried_subject_waits_and_its_key_continues():
    node = node_with("best_tried")
    keyed(node, Producer(5), [("a", b"a1"), ("a", b"a2")])
    owner = Owner(node, "c1", retry=Retry(first=10, jitter=0))
    owner.lease(ALL)
    owner.pull()
    owner.nack(owner.first_of("a"), None)
    assert bodies(owner.rows) == [b"a2"]
    owner.ack(*owner.rows)
    node.later(9)
    owner.lease()
    node.later(1.5)
    assert [(row.body, row.attempt) for row in owner.pull()] == [(b"a1", 2)]


def test_a_retry_that_another_owner_acked_is_not_redelivered_after_the_key_returns_and_a_restart():
    node = node_with("best_tried")
    retry = Retry(first=5, jitter=0)
    keyed(node, Producer(5), [("a", b"a1"), ("b", b"b1")])
    first, second = Owner(node, "c1", retry=retry), Owner(node, "c2", retry=retry)
    first.lease(ALL)
    first.pull()
    failed = first.first_of("a")
    first.nack(failed, None)
    first.ack(*first.rows)
    # The key changes its owner while its message waits. Both cursors have the retry; one delivers it.
    first.lease([(0, failed.lp, 1), (failed.lp + 1, 1024, 1)])
    second.lease([(failed.lp, failed.lp + 1, 2)])
    node.later(6)
    first.lease()
    second.lease()
    assert first.pull() == []
    assert [(row.body, row.attempt) for row in second.pull()] == [(b"a1", 2)]
    second.ack(*second.rows)
    second.lease([])
    first.lease([(0, 1024, 3)])
    assert first.pull() == []
    assert len(list(first.group.cursors)) == 1
    node = first.node = node.killed()
    first.attach()
    node.later(30)
    first.lease()
    assert first.pull() == []


def parked_key() -> tuple[Node, Owner, Producer]:
    node = node_with()
    producer = Producer(5)
    keyed(node, producer, [("a", b"a1"), ("b", b"b1"), ("a", b"a2")])
    owner = Owner(node, "c1", retry=Retry(attempts=1))
    owner.lease(ALL)
    owner.pull()
    owner.nack(owner.first_of("a"), None)
    keyed(node, producer, [("a", b"a3"), ("b", b"b2")])
    assert bodies(owner.pull()) == [b"b2"]
    assert [cursor.parked for cursor in owner.group.cursors.by_key.values()] == [True]
    assert owner.group.failures.dead.count == 1
    owner.ack(*owner.rows)
    return node, owner, producer


@pytest.mark.parametrize("crash", [False, True])
def test_a_key_out_of_attempts_is_parked_and_resume_redelivers_the_failed_message(crash: bool):
    node, owner, producer = parked_key()
    if crash:
        node = owner.node = node.killed()
        owner.attach()
        owner.lease()
    [key] = [cursor.key for cursor in owner.group.policy.parked()]
    assert owner.group.policy.resume(key, skip=False)
    node.turn()
    assert bodies(owner.pull()) == [b"a1"]
    owner.ack(*owner.rows)
    assert bodies(owner.pull()) == [b"a2", b"a3"]
    owner.ack(*owner.rows)
    keyed(node, producer, [("a", b"a4")])
    assert bodies(owner.pull()) == [b"a4"]
    assert owner.group.failures.dead.count == 0


def test_skip_continues_after_the_failed_message_which_stays_a_dead_letter():
    _, owner, _ = parked_key()
    [key] = [cursor.key for cursor in owner.group.policy.parked()]
    assert owner.group.policy.resume(key, skip=True)
    assert bodies(owner.pull()) == [b"a2", b"a3"]
    assert owner.group.failures.dead.count == 1
    assert not owner.group.policy.resume(key, skip=True)


@pytest.mark.parametrize("crash", [False, True])
def test_resume_does_not_affect_letters_that_were_skipped_before(crash: bool):
    node, owner, _ = parked_key()
    [key] = [cursor.key for cursor in owner.group.policy.parked()]
    assert owner.group.policy.resume(key, skip=True)
    node.turn()
    owner.pull()
    owner.nack(owner.first_of("a"), None)
    assert owner.group.failures.dead.count == 2
    if crash:
        node = owner.node = node.killed()
        owner.attach()
        owner.lease()
    assert owner.group.policy.resume(key, skip=False)
    node.turn()
    assert bodies(owner.pull()) == [b"a2"]
    owner.ack(*owner.rows)
    assert bodies(owner.pull()) == [b"a3"]
    assert owner.group.failures.dead.count == 1


def test_lps_wanted_up_to_a_fence_are_drained_when_all_rows_below_it_are_done():
    node = node_with()
    producer = Producer(5)
    keyed(node, producer, [("a", b"1"), ("b", b"2")])
    fences: list = []
    sealing.seal(node.broker, SUBJECT, [(0, 1024)], 2, fences.extend)
    node.turn()
    assert fences == [(0, 1024, 2)]
    sealing.open_lps(node.broker, SUBJECT, SUBJECT, [(0, 1024)], 3, SubjectSettings(order="strict"))
    keyed(node, producer, [("a", b"3"), ("b", b"4")])
    owner = Owner(node, "c1")
    assert owner.lease([(0, 1024, 1, 2)]).drained == []
    rows = owner.pull_all()
    assert bodies(rows) == [b"1", b"2"]
    owner.ack(rows[0])
    drained = {each for first, end in owner.lease().drained for each in range(first, end)}
    assert lp_of_key("b") not in drained
    owner.ack(rows[1])
    assert owner.lease().drained == [(0, 1024)]
    assert owner.pull_all() == []
    owner.lease(ALL)
    assert bodies(owner.pull_all()) == [b"3", b"4"]


def test_rows_without_keys_belong_to_an_lp_that_the_partition_took_when_they_were_stored():
    node = node_with()
    producer = Producer(5)

    def send(count: int) -> None:
        node.submit(producer.frame(SUBJECT, *(b"x" for _ in range(count))))
        node.turn()

    send(300)
    sealing.seal(node.broker, SUBJECT, [(0, 900)], 2, lambda _: None)
    node.turn()
    send(300)
    sealing.open_lps(node.broker, SUBJECT, SUBJECT, [(100, 110)], 3, SubjectSettings(order="strict"))
    sealing.seal(node.broker, SUBJECT, [(900, 1024)], 4, lambda _: None)
    node.turn()
    send(300)
    for restarted in (node, node.killed()):
        partition = restarted.partition(SUBJECT)
        found = {start: keys for start, _, keys in keys_in(partition, restarted.broker.message_log, 0, 900)}
        assert len(set(found[0].lps.tolist())) > 2
        assert set(found[300].lps.tolist()) <= set(range(900, 1024))
        assert set(found[600].lps.tolist()) <= set(range(100, 110))


def test_rows_without_keys_keep_their_lp_when_the_partition_takes_all_lps_again():
    node = node_with()
    producer = Producer(5)
    sealing.seal(node.broker, SUBJECT, [(0, 900)], 2, lambda _: None)
    node.turn()
    node.submit(producer.frame(SUBJECT, *(b"x" for _ in range(300))))
    node.turn()
    sealing.open_lps(node.broker, SUBJECT, SUBJECT, [(0, 1024)], 3, SubjectSettings(order="strict"))
    node.submit(producer.frame(SUBJECT, *(b"x" for _ in range(300))))
    node.turn()
    for restarted in (node, node.killed()):
        partition = restarted.partition(SUBJECT)
        found = {start: keys for start, _, keys in keys_in(partition, restarted.broker.message_log, 0, 600)}
        assert set(found[0].lps.tolist()) <= set(range(900, 1024))
        assert not set(found[300].lps.tolist()) <= set(range(900, 1024))


def test_a_consumer_with_an_older_route_gets_no_rows_stored_after_the_lp_returned():
    """R4: in between, the key has rows in a partition that the older route does not name."""
    node = node_with()
    producer = Producer(5)
    keyed(node, producer, [("a", b"1")])
    sealing.seal(node.broker, SUBJECT, [(0, 1024)], 2, lambda _: None)
    node.turn()
    sealing.open_lps(node.broker, SUBJECT, SUBJECT, [(0, 1024)], 4, SubjectSettings(order="strict"))
    keyed(node, producer, [("a", b"2")])
    for restarted in (node, node.killed()):
        restarted.clock.advance(60)
        restarted.membership.lose_silent()
        restarted.turn()
        owner = Owner(restarted, "c1")
        assert owner.lease(ALL, route=1).owned
        assert bodies(owner.pull_all()) == [b"1"]
        owner.lease(ALL, route=4)
        assert bodies(owner.pull_all()) == [b"2"]


def test_a_sealed_partition_refuses_new_rows_and_recognizes_resent_ones():
    node = node_with()
    producer = Producer(5)
    sent = keyed(node, producer, [("a", b"1")])
    sealing.seal(node.broker, SUBJECT, [(lp_of_key("a"), lp_of_key("a") + 1)], 2, lambda _: None)
    node.turn()
    again = node.submit(Sent(SUBJECT, sent.data, sent.bodies))
    node.turn()
    assert again.sequence == 0
    refused = keyed(node, producer, [("a", b"2")])
    assert isinstance(refused.error, StaleRoute)
    assert refused.error.details["last"] == 1
    other = next(f"k{i}" for i in range(1000) if lp_of_key(f"k{i}") != lp_of_key("a"))
    assert keyed(node, Producer(6), [(other, b"3")]).sequence == 1
    restarted = node.killed()
    assert isinstance(keyed(restarted, Producer(8), [("a", b"4")]).error, StaleRoute)


def test_a_member_that_asks_for_another_order_is_refused_with_both_settings_named():
    node = node_with()
    Owner(node, "c1")
    with pytest.raises(GroupMismatch, match=r"ordered=True.*asks for ordered=False"):
        node.attach(SUBJECT, GROUP, "c2")
    with pytest.raises(GroupMismatch, match=r"ordered=True.*asks for affinity='key'"):
        node.attach(SUBJECT, GROUP, "c2", ordered=True, affinity=True)
    with pytest.raises(InvalidArgument, match="an affinity group needs locks"):
        node.attach(SUBJECT, "other", "c2", affinity=True)
    with pytest.raises(InvalidArgument, match="cannot be a broadcast group, nor have"):
        node.attach(SUBJECT, "other", "c2", ordered=True, delivery="at_most_once")


def test_returned_rows_with_different_attempts_are_redelivered_in_order():
    node = node_with()
    keyed(node, Producer(5), [("a", b"1"), ("a", b"2"), ("a", b"3")])
    for name, begun in (("c1", 3), ("c2", 2)):
        owner = Owner(node, name)
        owner.lease(ALL)
        first, *_ = [owner.pull(1) for _ in range(begun)]
        if name == "c2":
            # The second row is on its third attempt now, the others on their second.
            owner.give_back(first)
        node.membership.detach(owner.consumer)
        node.turn()
    last = Owner(node, "c3")
    last.lease(ALL)
    assert [(row.body, row.attempt) for row in last.pull()] == [(b"1", 2), (b"2", 3), (b"3", 2)]


def test_no_new_row_overtakes_a_returned_row_that_does_not_fit_in_a_reply():
    node = node_with(message_segment_size=1 << 20)
    producer = Producer(5)
    for body in (b"1", b"2" * 5000, b"3"):
        keyed(node, producer, [("a", body)])
    owner = Owner(node, "c1")
    owner.lease(ALL)
    first, second = owner.pull(1), owner.pull(1)
    owner.give_back([*first, *second])
    [delivery] = node.pull(owner.consumer, 100, 1000).answers
    assert delivery is not None
    assert [(start, end) for start, end, _ in delivery.ranges] == [(0, 1)]


def pulled_ahead(node: Node, *, frames: int = 20, rows: int = 500, keys: int = 200) -> Owner:
    """An owner of all LPs that holds all rows; the keys of adjacent rows differ."""
    producer = Producer(5)
    for frame in range(frames):
        numbers = range(frame * rows, (frame + 1) * rows)
        keyed(node, producer, [(f"k{number % keys}", b"%d" % number) for number in numbers])
    owner = Owner(node, "c1")
    owner.lease(ALL)
    owner.pull(frames * rows)
    return owner


def ranges_in(owner: Owner) -> int:
    return sum(len(cursor.returned) + sum(map(len, cursor.held.values())) for cursor in owner.group.cursors)


@pytest.mark.parametrize("begun", [0, 3000])
@pytest.mark.parametrize("old_owner_first", [False, True])
def test_returning_half_of_the_rows_pulled_ahead_takes_few_ranges(begun: int, old_owner_first: bool):
    node = node_with(message_segment_size=4 << 20)
    old = pulled_ahead(node)
    begun_rows, ahead = old.rows[:begun], old.rows[begun:]
    assert len(ahead) == 10_000 - begun
    new = Owner(node, "c2")
    logged = node.broker.action_log.end
    old.by_lps, old.rows = True, ahead
    if old_owner_first:
        # The old owner learns of the new allocation before the new one asks.
        old.lease([(0, 512, 1)])
    new.lease([(512, 1024, 2)])
    old.lease([(0, 512, 1)])
    old.rows = [*begun_rows, *old.rows]
    assert ranges_in(old) <= 40
    assert len(list(old.group.cursors)) <= 4
    old.ack(*begun_rows)
    new.lease()
    old.lease()
    assert new.leased is not None
    assert new.leased.owned == [(512, 1024, 2)]
    assert (node.broker.action_log.end - logged) / 40 < 1_000
    mine = [row for row in new.pull_all() if row.key]
    assert bodies(mine) == [row.body for row in ahead if row.lp >= 512]
    # The rows that were not returned are acked, and no range is left.
    old.ack(*old.rows)
    new.ack(*new.rows)
    old.lease()
    assert old.group.floor == node.partition(SUBJECT).visible
    assert ranges_in(old) == 0


def test_open_rows_between_acked_ones_are_few_ranges_for_their_next_owner():
    node = node_with(message_segment_size=4 << 20)
    old = pulled_ahead(node, frames=4)
    left = [row for row in old.rows if row.lp >= 512]
    old.ack(*[row for row in old.rows if row.lp < 512])
    assert ranges_in(old) > 400
    node.membership.detach(old.consumer)
    node.turn()
    new = Owner(node, "c2")
    new.lease([(512, 1024, 2)])
    assert sum(len(cursor.returned) for cursor in new.group.cursors.of(new.consumer.id)) <= 8
    assert bodies(new.pull_all()) == bodies(left)


def test_a_lock_changes_its_owner_when_the_last_of_its_rows_is_acked():
    node = node_with(message_segment_size=4 << 20)
    old = pulled_ahead(node, frames=2)
    new = Owner(node, "c2")
    new.lease([(512, 1024, 2)])
    leaving = sorted({row.lp for row in old.rows if row.lp >= 512})
    for lp in leaving[:5]:
        new.lease()
        assert lp not in new.rights
        old.ack(*[row for row in old.rows if row.lp == lp])
        new.lease()
        assert lp in new.rights
    assert not set(leaving[5:]) & set(new.rights)


def test_an_owner_that_wants_a_leaving_lock_again_keeps_the_rows_it_holds():
    node = node_with()
    old = pulled_ahead(node, frames=2, rows=100, keys=50)
    new = Owner(node, "c2")
    new.lease([(512, 1024, 2)])
    half = [row for row in old.rows if row.lp >= 768]
    new.lease([(512, 768, 2)])
    assert [run for run in old.lease([(0, 512, 1), (768, 1024, 3)]).owned if run[0] == 768] == [(768, 1024, 3)]
    assert [row for row in old.rows if row.lp >= 768] == half
    old.ack(*old.rows)
    new.ack(*new.pull_all())
    old.lease()
    assert old.group.floor == node.partition(SUBJECT).visible


def test_returning_rows_of_invalid_logical_partitions_is_refused():
    node = node_with()
    owner = Owner(node, "c1")
    with pytest.raises(InvalidArgument, match="are runs of logical partitions"):
        node.broker.leases.give_back(owner.consumer, [(0, 2000)], [(0, 1, 1)], [1])
