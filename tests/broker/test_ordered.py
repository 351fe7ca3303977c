"""Ordered groups on a broker: locks, strands, failures that hold one key, parking."""

from __future__ import annotations

import pytest

from plait.broker.partitions import sealing
from plait.errors import GroupMismatch, InvalidArgument, StaleRoute
from plait.model.logical_partitions import lp_of_key
from plait.model.retry_policy import Retry
from plait.storage.catalog import SubjectSettings
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


def test_everybody_who_waits_is_served_when_rows_come():
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


def test_without_locks_nothing_is_handed_out():
    node = node_with()
    keyed(node, Producer(5), [("a", b"1")])
    owner = Owner(node, "c1")
    assert owner.pull() == []
    owner.lease(ALL)
    assert bodies(owner.pull()) == [b"1"]


def test_each_owner_gets_the_rows_of_its_logical_partitions():
    node = node_with()
    low, high = keys_by_half()
    producer = Producer(5)
    for number in range(10):
        keyed(node, producer, [(low, b"l%d" % number), (high, b"h%d" % number)])
    one, two = Owner(node, "c1"), Owner(node, "c2")
    one.lease(halves()[0])
    two.lease(halves()[1])
    assert bodies(one.pull()) == [b"l%d" % number for number in range(10)]
    assert bodies(two.pull()) == [b"h%d" % number for number in range(10)]


def test_keyless_rows_are_everybodys_and_all_are_handed_out_once():
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


def test_acked_rows_never_come_again_after_a_kill():
    node = node_with()
    low, high = keys_by_half()
    producer = Producer(5)
    for number in range(10):
        keyed(node, producer, [(low, b"l%d" % number), (high, b"h%d" % number)])
    one, two = Owner(node, "c1"), Owner(node, "c2")
    one.lease(halves()[0])
    two.lease(halves()[1])
    one.ack(*one.pull()[:7])
    two.pull()
    again = node.killed()
    again.clock.advance(60)
    again.membership.lose_silent()
    again.turn()
    both = Owner(again, "c3")
    both.lease([(0, 1024, 2)])
    assert sorted(bodies(both.pull_all())) == sorted([b"l7", b"l8", b"l9", *(b"h%d" % number for number in range(10))])


def test_a_lock_passes_on_only_when_nothing_is_in_the_owners_hands():
    node = node_with()
    keyed(node, Producer(5), [("a", b"1"), ("a", b"2")])
    old, new = Owner(node, "c1"), Owner(node, "c2")
    old.lease(ALL)
    first, second = old.pull()
    news = old.consumer.news
    assert new.lease([(0, 1024, 2)]).owned != [(0, 1024, 2)]
    assert old.consumer.news > news
    assert new.pull() == []
    # The lock of the key is in the old owner's hands still; all others have passed on.
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


def test_an_owner_that_is_silent_past_its_lease_loses_its_locks_and_its_acks_mean_nothing():
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


def test_after_a_restart_the_owner_goes_on_and_nobody_else_gets_its_locks_within_a_lease():
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
    # It has what is in its hands until it is done with it.
    old.ack(*old.rows) if old.rows else None
    again.clock.advance(again.broker.leases.longest)
    again.broker.leases.look()
    assert new.lease().owned == [(0, 1024, 2)]


def test_floors_fence_out_epochs_that_a_power_loss_took_from_the_log():
    node = node_with()
    node.broker.leases.waits_for_floors = True
    owner = Owner(node, "c1")
    assert owner.lease([(0, 1024, 5)]).owned == []
    node.broker.leases.set_floors({(SUBJECT, GROUP): [(0, 1024, 7)]})
    assert owner.lease([(0, 1024, 6)]).owned == []
    assert owner.lease([(0, 1024, 7)]).owned == [(0, 1024, 7)]


def test_a_failed_message_of_a_strict_subject_holds_its_key_alone():
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
    assert not owner.group.strands.by_key


def test_a_failed_message_of_a_best_tried_subject_waits_and_its_key_goes_on():
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


def test_a_retry_that_was_handled_elsewhere_does_not_come_again_when_its_keys_have_come_back_and_the_broker_restarts():
    node = node_with("best_tried")
    retry = Retry(first=5, jitter=0)
    keyed(node, Producer(5), [("a", b"a1"), ("b", b"b1")])
    first, second = Owner(node, "c1", retry=retry), Owner(node, "c2", retry=retry)
    first.lease(ALL)
    first.pull()
    failed = first.first_of("a")
    first.nack(failed, None)
    first.ack(*first.rows)
    # The key changes hands while its message waits; both halves know of it, and one has it.
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
    assert len(list(first.group.strands)) == 1
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
    assert [strand.parked for strand in owner.group.strands.by_key.values()] == [True]
    assert owner.group.pull_log.dead.count == 1
    owner.ack(*owner.rows)
    return node, owner, producer


@pytest.mark.parametrize("crash", [False, True])
def test_out_of_attempts_a_key_is_parked_and_resume_goes_on_with_the_message_that_failed(crash: bool):
    node, owner, producer = parked_key()
    if crash:
        node = owner.node = node.killed()
        owner.attach()
        owner.lease()
    [key] = [strand.key for strand in owner.group.parked()]
    assert owner.group.resume(key, node.broker, skip=False)
    node.turn()
    assert bodies(owner.pull()) == [b"a1"]
    owner.ack(*owner.rows)
    assert bodies(owner.pull()) == [b"a2", b"a3"]
    owner.ack(*owner.rows)
    keyed(node, producer, [("a", b"a4")])
    assert bodies(owner.pull()) == [b"a4"]
    assert owner.group.pull_log.dead.count == 0


def test_skip_goes_on_behind_the_message_that_failed_which_stays_a_dead_letter():
    node, owner, _ = parked_key()
    [key] = [strand.key for strand in owner.group.parked()]
    assert owner.group.resume(key, node.broker, skip=True)
    assert bodies(owner.pull()) == [b"a2", b"a3"]
    assert owner.group.pull_log.dead.count == 1
    assert not owner.group.resume(key, node.broker, skip=True)


@pytest.mark.parametrize("crash", [False, True])
def test_resume_leaves_letters_that_were_skipped_before_where_they_are(crash: bool):
    node, owner, _ = parked_key()
    [key] = [strand.key for strand in owner.group.parked()]
    assert owner.group.resume(key, node.broker, skip=True)
    node.turn()
    owner.pull()
    owner.nack(owner.first_of("a"), None)
    assert owner.group.pull_log.dead.count == 2
    if crash:
        node = owner.node = node.killed()
        owner.attach()
        owner.lease()
    assert owner.group.resume(key, node.broker, skip=False)
    node.turn()
    assert bodies(owner.pull()) == [b"a2"]
    owner.ack(*owner.rows)
    assert bodies(owner.pull()) == [b"a3"]
    assert owner.group.pull_log.dead.count == 1


def test_what_is_wanted_up_to_a_fence_is_drained_when_all_below_is_done_and_nothing_behind_it_is_handed_out():
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


def test_keyless_rows_are_of_a_logical_partition_that_was_taken_when_they_were_stored():
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
        found = {start: keys for start, _, keys in partition.keys_in(restarted.broker.message_log, 0, 900)}
        assert len(set(found[0].lps.tolist())) > 2
        assert set(found[300].lps.tolist()) <= set(range(900, 1024))
        assert set(found[600].lps.tolist()) <= set(range(100, 110))


def test_keyless_rows_stay_whose_they_were_when_the_partition_takes_everything_again():
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
        found = {start: keys for start, _, keys in partition.keys_in(restarted.broker.message_log, 0, 600)}
        assert set(found[0].lps.tolist()) <= set(range(900, 1024))
        assert not set(found[300].lps.tolist()) <= set(range(900, 1024))


def test_who_goes_by_an_older_route_gets_nothing_that_came_after_a_way_back():
    """R4: between the two there are rows elsewhere that it does not know of."""
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


def test_a_sealed_partition_refuses_what_is_new_and_knows_what_it_has():
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


def test_a_member_that_asks_for_another_order_is_refused_with_both_named():
    node = node_with()
    Owner(node, "c1")
    with pytest.raises(GroupMismatch, match=r"ordered=True.*asks for ordered=False"):
        node.attach(SUBJECT, GROUP, "c2")
    with pytest.raises(GroupMismatch, match=r"ordered=True.*asks for affinity='key'"):
        node.attach(SUBJECT, GROUP, "c2", ordered=True, affinity=True)
    with pytest.raises(InvalidArgument, match="affinity goes by locks"):
        node.attach(SUBJECT, "other", "c2", affinity=True)
    with pytest.raises(InvalidArgument, match="neither broadcast nor"):
        node.attach(SUBJECT, "other", "c2", ordered=True, delivery="at_most_once")


def test_what_came_back_on_different_attempts_comes_again_in_order():
    node = node_with()
    keyed(node, Producer(5), [("a", b"1"), ("a", b"2"), ("a", b"3")])
    for name, begun in (("c1", 3), ("c2", 2)):
        owner = Owner(node, name)
        owner.lease(ALL)
        first, *_ = [owner.pull(1) for _ in range(begun)]
        if name == "c2":
            # The second is on its third attempt now, those around it on their second.
            owner.give_back(first)
        node.membership.detach(owner.consumer)
        node.turn()
    last = Owner(node, "c3")
    last.lease(ALL)
    assert [(row.body, row.attempt) for row in last.pull()] == [(b"1", 2), (b"2", 3), (b"3", 2)]


def test_nothing_new_overtakes_what_came_back_and_has_no_room_in_an_answer():
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
    """An owner of everything with all of it in hands: rows of many keys, one after another."""
    producer = Producer(5)
    for frame in range(frames):
        numbers = range(frame * rows, (frame + 1) * rows)
        keyed(node, producer, [(f"k{number % keys}", b"%d" % number) for number in numbers])
    owner = Owner(node, "c1")
    owner.lease(ALL)
    owner.pull(frames * rows)
    return owner


def ranges_in(owner: Owner) -> int:
    return sum(len(strand.returned) + sum(map(len, strand.held.values())) for strand in owner.group.strands)


@pytest.mark.parametrize("begun", [0, 3000])
@pytest.mark.parametrize("told_first", [False, True])
def test_handing_over_half_of_what_was_pulled_ahead_takes_a_few_ranges(begun: int, told_first: bool):
    node = node_with(message_segment_size=4 << 20)
    old = pulled_ahead(node)
    in_hands, ahead = old.rows[:begun], old.rows[begun:]
    assert len(ahead) == 10_000 - begun
    new = Owner(node, "c2")
    logged = node.broker.action_log.end
    old.by_lps, old.rows = True, ahead
    if told_first:
        # The meta server was faster than the other member.
        old.lease([(0, 512, 1)])
    new.lease([(512, 1024, 2)])
    old.lease([(0, 512, 1)])
    old.rows = [*in_hands, *old.rows]
    assert ranges_in(old) <= 40
    assert len(list(old.group.strands)) <= 4
    old.ack(*in_hands)
    new.lease()
    old.lease()
    assert new.leased is not None
    assert new.leased.owned == [(512, 1024, 2)]
    assert (node.broker.action_log.end - logged) / 40 < 1_000
    mine = [row for row in new.pull_all() if row.key]
    assert bodies(mine) == [row.body for row in ahead if row.lp >= 512]
    # What was not given back is done as ever, and nothing is left of it.
    old.ack(*old.rows)
    new.ack(*new.rows)
    old.lease()
    assert old.group.floor == node.partition(SUBJECT).visible
    assert ranges_in(old) == 0


def test_rows_that_were_given_back_one_by_one_are_few_ranges_for_their_next_owner():
    node = node_with(message_segment_size=4 << 20)
    old = pulled_ahead(node, frames=4)
    rows = list(old.rows)
    new = Owner(node, "c2")
    new.lease([(512, 1024, 2)])
    old.lease([(0, 512, 1)])
    new.lease()
    assert sum(len(strand.returned) for strand in old.group.strands.of(new.consumer.id)) <= 8
    assert bodies(new.pull_all()) == [row.body for row in rows if row.lp >= 512]


def test_what_is_left_between_rows_that_are_done_is_few_ranges_for_its_next_owner():
    node = node_with(message_segment_size=4 << 20)
    old = pulled_ahead(node, frames=4)
    left = [row for row in old.rows if row.lp >= 512]
    old.ack(*[row for row in old.rows if row.lp < 512])
    assert ranges_in(old) > 400
    node.membership.detach(old.consumer)
    node.turn()
    new = Owner(node, "c2")
    new.lease([(512, 1024, 2)])
    assert sum(len(strand.returned) for strand in new.group.strands.of(new.consumer.id)) <= 8
    assert bodies(new.pull_all()) == bodies(left)


def test_a_lock_passes_on_with_the_last_of_its_own_rows_in_hands():
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


def test_a_lock_that_is_wanted_back_goes_on_with_what_is_in_hands():
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


def test_giving_back_what_is_no_run_of_logical_partitions_is_refused():
    node = node_with()
    owner = Owner(node, "c1")
    with pytest.raises(InvalidArgument, match="not runs of logical partitions"):
        node.broker.leases.give_back(owner.consumer, [(0, 2000)], [(0, 1, 1)], [1])
