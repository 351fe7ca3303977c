"""At most once: delivered rows count as done, and a consumer may return rows that it has not begun."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.broker.groups.at_most_once import AtMostOnceGroup
from plait.broker.groups.group import AttachedConsumer
from plait.limits import HANDED_RANGES_MAX
from tests.support.broker_node import Node, Producer


def once(node: Node, client: str = "c1") -> AttachedConsumer:
    return node.attach("orders", "once", client, delivery="at_most_once")


def filled(count: int) -> Node:
    node = Node()
    node.send("orders", *[b"x"] * count, producer=Producer(5))
    return node


def test_a_row_is_returned_once_and_only_by_the_consumer_that_got_it():
    node = filled(6)
    one, two = once(node, "c1"), once(node, "c2")
    node.pull(one, 3)
    node.pull(two, 3)
    node.nack(two, (0, 3), counted=False)
    node.nack(one, (0, 3), counted=False)
    node.nack(one, (0, 3), counted=False)
    assert node.pull(two, 9).ranges == [(0, 3, 1)]
    node.nack(one, (0, 3), counted=False)
    assert not node.pull(two, 9).ranges


def test_a_consumer_that_attaches_again_may_return_rows_of_its_earlier_session():
    node = filled(4)
    consumer = once(node)
    node.pull(consumer, 4)
    consumer.connected = False
    node.nack(once(node), (2, 4), counted=False)
    assert node.pull(once(node, "c2"), 4).ranges == [(2, 4, 1)]


def test_a_nack_changes_nothing_at_most_once():
    node = filled(3)
    consumer = once(node)
    node.pull(consumer, 3)
    node.nack(consumer, (0, 3))
    assert not node.pull(consumer, 3).ranges


def test_a_rewind_forgets_which_rows_may_be_returned():
    node = filled(6)
    consumer = once(node)
    node.pull(consumer, 6)
    node.membership.detach(consumer)
    node.membership.rewind("orders", "once", ["sequence", 4])
    consumer = once(node)
    node.nack(consumer, (0, 6), counted=False)
    assert node.pull(consumer, 9).ranges == [(4, 6, 1)]


def test_the_rows_that_a_consumer_may_return_take_bounded_memory():
    node = filled(2 * HANDED_RANGES_MAX + 100)
    one, two = once(node, "c1"), once(node, "c2")
    for _ in range(HANDED_RANGES_MAX + 50):
        node.pull(one, 1)
        node.pull(two, 1)
    group = node.group("orders", "once")
    assert isinstance(group, AtMostOnceGroup)
    assert len(group.delivered[one.id]) == HANDED_RANGES_MAX
    node.membership.detach(one)
    assert one.id not in group.delivered


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("send", "pull", "pull", "return", "return part", "restart", "kill", "checkpoint")),
        st.integers(0, 2),
        st.integers(1, 6),
    ),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=40, deadline=None)
def test_every_row_is_handled_at_most_once_and_returned_rows_are_not_lost(steps: list[tuple[str, int, int]]):
    node, producer = Node(flush="sync"), Producer(5)
    held: dict[str, list[tuple[int, int]]] = {}
    begun: set[int] = set()
    for step, index, count in steps:
        client = f"c{index}"
        if step == "send":
            node.send("orders", *[b"x"] * count, producer=producer)
        elif step in ("restart", "kill"):
            node = node.restart() if step == "restart" else node.killed()
            held = {}
        elif step == "checkpoint":
            node.checkpoint()
        elif step == "pull":
            group = node.partition("orders").groups.get("once")
            known = group.consumers.get(client) if group else None
            consumer = known if known and known.connected else once(node, client)
            for start, end, _ in node.pull(consumer, count).ranges:
                assert begun.isdisjoint(range(start, end))
                begun.update(range(start, end))
                held.setdefault(client, []).append((start, end))
        elif client in held:
            back = held.pop(client)
            if step == "return part":
                back = [(start + (end - start) // 2, end) for start, end in back]
            # The rows may be of an earlier epoch: report each epoch, only one applies.
            ranges = [(s, e, epoch) for s, e in back for epoch in range(1, node.broker.turn.epoch + 1)]
            node.nack(node.group("orders", "once").consumers[client], *ranges, counted=False)
            begun -= {sequence for s, e in back for sequence in range(s, e)}
    last = once(node, "last")
    rest: list[int] = []
    while ranges_ := node.pull(last, 1000).ranges:
        rest += [sequence for start, end, _ in ranges_ for sequence in range(start, end)]
    assert sorted([*rest, *begun]) == list(range(node.partition("orders").visible))
