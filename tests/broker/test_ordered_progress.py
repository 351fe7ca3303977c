"""Pulls of ordered groups end for rows of any size: a row that does not fit ends the pull."""

from __future__ import annotations

import pytest

from plait.broker.partitions.frame_search import keys_in
from plait.limits import KIB, MIB, ServerLimits
from tests.broker.ordered_node import Owner, keyed, make_subject
from tests.support.broker_node import Node, Producer
from tests.support.progress import within_cpu_seconds

ALL = [(0, 1024, 1)]


def large_node() -> Node:
    node = Node(message_segment_size=4 * MIB)
    make_subject(node)
    return node


@pytest.mark.parametrize(("count", "size"), [(8, 300 * KIB), (60, 30 * KIB)])
@pytest.mark.parametrize("together", [True, False])
def test_after_a_nack_the_rows_of_a_key_that_do_not_fit_one_pull_are_delivered_in_several(
    count: int, size: int, together: bool
):
    node = large_node()
    producer = Producer(5)
    rows = [("a", b"%d " % number + bytes(size)) for number in range(count)]
    for frame in [rows] if together else [[row] for row in rows]:
        keyed(node, producer, frame)
    owner = Owner(node, "c1")
    owner.lease(ALL)
    owner.pull()
    seen: list[bytes] = []
    with within_cpu_seconds(5):
        owner.nack(owner.first_of("a"))
        for _ in range(3 * count):
            owner.pull()
            for row in sorted(owner.rows):
                seen.append(row.body)
                owner.ack(row)
    assert seen == [body for _, body in rows]


def test_a_key_with_large_rows_does_not_delay_other_keys():
    node = large_node()
    producer = Producer(5)
    keyed(node, producer, [("a", bytes(300 * KIB)) for _ in range(4)])
    owner = Owner(node, "c1")
    owner.lease(ALL)
    owner.pull()
    owner.nack(owner.first_of("a"), 60.0)
    keyed(node, producer, [("b", b"small")])
    with within_cpu_seconds(5):
        assert [row.body for row in owner.pull()] == [b"small"]


def test_the_key_cache_has_one_limit_for_all_partitions():
    node = Node(message_segment_size=1 << 20, limits=ServerLimits(key_rows=1000))
    for number in range(20):
        subject = f"s{number}"
        node.broker.create_subject(subject)
        for frame in range(3):
            keyed(node, Producer(100 + 10 * number + frame), [("a", b"x")] * 100, subject)
        partition = node.partition(subject)
        assert sum(len(keys.lps) for _, _, keys in keys_in(partition, node.broker.message_log, 0, 300)) == 300
        assert node.broker.catalog.known_rows.rows <= 1000
        # The rows that were read last are still cached.
        assert partition.keys.known(200) is not None
