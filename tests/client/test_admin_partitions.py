"""Management of a subject with several partitions: the client asks all of them and merges the replies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import msgspec
import pytest

import plait
from plait.broker.groups.group import NackOutcome
from plait.client.admin.admin import merged_groups
from plait.client.types import PartitionName
from plait.model.reason import Reason
from plait.wire.admin.subjects import ConsumerInfo, GroupInfo
from tests.client.support import EAGER, PlayedMeta

#: Keys of partition 0 and of partition 1.
LEFT, RIGHT = "k0", "k1"
PLACES = ["s@g1", "s#1@g2"]


@pytest.fixture
async def client(meta: PlayedMeta) -> AsyncIterator[plait.Client]:
    async with meta.client(limits=EAGER) as connected:
        yield connected


async def attach(meta: PlayedMeta, partition: int, group: str, *, dead: int = 0, acked: int = 0) -> None:
    """Attach a group to one partition, directly at its broker; reject the first messages and ack the next."""
    membership = meta.broker(partition).server.membership
    broker = meta.broker(partition).server.broker
    consumer = membership.attach(meta.name(partition), group, f"c{partition}", retry=plait.Retry())
    if dead + acked:
        broker.pull(consumer, dead + acked, 1 << 20, 0.0, lambda _: None)
        epoch = broker.turn.epoch
        if acked:
            broker.ack(consumer, [(dead, dead + acked, epoch)], lambda: None)
        if dead:
            failure = NackOutcome(None, Reason("ValueError", f"reason {partition}"), True, True)
            broker.nack(consumer, [(0, dead, epoch)], lambda: None, failure)
    broker.turn.commit()
    membership.detach(consumer)
    broker.turn.commit()


async def filled(meta: PlayedMeta, client: plait.Client) -> None:
    """Send three rows to one partition and two to the other; attach a group to both, and one to the second only."""
    await client.send_many("s", [b"l0", b"l1", b"l2", b"r0", b"r1"], keys=[LEFT] * 3 + [RIGHT] * 2)
    await attach(meta, 0, "g", dead=1, acked=1)
    await attach(meta, 1, "g", dead=2)
    await attach(meta, 1, "only")


async def test_subjects_have_an_entry_for_each_partition_and_their_sum(meta: PlayedMeta, client: plait.Client) -> None:
    await filled(meta, client)
    infos = await client.admin.subjects()
    assert [(i.subject, i.partition, i.count) for i in infos] == [("s", "s#1@g2", 2), ("s", "s@g1", 3)]
    details = await client.admin.subject("s")
    assert (details.subject.partition, details.subject.count, details.subject.groups) == ("s@g1, s#1@g2", 5, 2)
    assert [(p.partition, p.count) for p in details.partitions] == [("s@g1", 3), ("s#1@g2", 2)]
    assert details.subject.size == sum(p.size for p in details.partitions)
    assert [g.group for g in details.groups] == ["g", "only"]


async def test_a_group_is_the_sum_over_its_partitions(meta: PlayedMeta, client: plait.Client) -> None:
    await filled(meta, client)
    group = await client.admin.group("s", "g")
    assert (group.lag, group.dead, group.next) == (1, 3, 4)
    assert (await client.admin.group("s", "g", partition="s#1")).dead == 2
    assert (await client.admin.group("s", "only")).lag == 2
    assert [(g.group, g.dead) for g in await client.admin.groups("s")] == [("g", 3), ("only", 0)]
    assert await client.admin.groups() == await client.admin.groups("s")
    assert [g.group for g in await client.admin.groups("s", partition="s@g1")] == ["g"]
    with pytest.raises(plait.GroupNotFound):
        await client.admin.group("s", "missing")


def test_a_consumer_of_several_partitions_is_listed_once() -> None:
    def part(*consumers: ConsumerInfo) -> GroupInfo:
        numbers = dict.fromkeys(("next", "floor", "lag", "unacked", "returned", "waiting", "redelivered", "lost"), 1)
        online = sum(consumer.online for consumer in consumers)
        return GroupInfo(
            "s",
            "g",
            broadcast=False,
            delivery="at_least_once",
            retry=plait.Retry(),
            online=online,
            consumers=list(consumers),
            **numbers,
        )

    both = [ConsumerInfo("a", True, 2), ConsumerInfo("b", False, 1)]
    [merged] = merged_groups([part(*both), part(ConsumerInfo("a", True, 3), ConsumerInfo("c", True, 0))])
    assert merged.consumers == [ConsumerInfo("a", True, 5), ConsumerInfo("b", False, 1), ConsumerInfo("c", True, 0)]
    assert (merged.online, merged.lag, merged.next) == (2, 2, 2)


async def test_a_group_is_rewound_in_all_partitions_or_to_a_sequence_in_one(
    meta: PlayedMeta, client: plait.Client
) -> None:
    await filled(meta, client)
    for to, positions in (("latest", 5), ("earliest", 0)):
        moved = await client.admin.rewind_group("s", "g", to)
        assert sum(each.position for each in moved.partitions) == positions
    with pytest.raises(plait.InvalidArgument, match="each with sequences of its own: name one, as in partition='s@g1"):
        await client.admin.rewind_group("s", "g", 1)
    assert (await client.admin.rewind_group("s", "g", 1, partition="s#1@g2")).partitions[0].position == 1
    assert (await client.admin.group("s", "g", partition="s")).next == 0


async def test_dead_letters_name_their_partition(meta: PlayedMeta, client: plait.Client) -> None:
    await filled(meta, client)
    admin = client.admin
    assert await admin.dead_queues() == await admin.dead_queues("s") == [plait.DeadQueue("s", "g", 3)]
    letters = await admin.dead_letters("s", "g", bodies=True)
    assert sorted((str(x.partition), x.sequence, x.body) for x in letters) == [
        ("s#1@g2", 0, b"r0"),
        ("s#1@g2", 1, b"r1"),
        ("s@g1", 0, b"l0"),
    ]
    assert [x.store_time for x in letters] == sorted(x.store_time for x in letters)
    assert len(await admin.dead_letters("s", "g", limit=2)) == 2
    assert sum(r.count for r in await admin.dead_reasons("s", "g")) == 3
    with pytest.raises(plait.InvalidArgument, match="name one"):
        await admin.dead_letter("s", "g", 0)
    assert (await admin.dead_letter("s", "g", 0, partition="s#1@g2")).body == b"r0"
    assert (await admin.dead_letter("s", "g", 0, partition=letters[0].partition)).sequence == 0
    assert await admin.dead_letters("s", "only") == []


async def test_dead_letters_of_all_partitions_are_resent_and_purged(meta: PlayedMeta, client: plait.Client) -> None:
    await filled(meta, client)
    admin = client.admin
    with pytest.raises(plait.InvalidArgument, match="name one"):
        await admin.purge_dead("s", "g", sequences=[0])
    assert await admin.purge_dead("s", "g", sequences=[0], partition="s#1") == 1
    seen: list[int] = []
    assert await admin.resend_dead("s", "g", dry_run=True) == 2
    assert await admin.resend_dead("s", "g", progress=seen.append) == 2
    assert seen[-1] == 2
    assert await admin.dead_queues() == []


async def test_the_schedules_of_all_partitions_are_listed_by_due_time(client: plait.Client) -> None:
    hours = [5, 1, 4, 2, 3]
    receipts = await client.send_many(
        "s",
        [b"x"] * 5,
        keys=[LEFT, RIGHT, LEFT, RIGHT, LEFT],
        delay=[timedelta(hours=h) for h in hours],
    )
    admin = client.admin
    listed = await admin.scheduled("s")
    by_time = sorted(receipts, key=lambda r: r.deliver_at)  # type: ignore[arg-type,return-value]
    assert [(x.partition, x.number, x.message_id) for x in listed] == [
        (r.partition, r.schedule, r.message_id) for r in by_time
    ]
    assert [x.number for x in await admin.scheduled("s", limit=3)] == [x.number for x in listed[:3]]
    assert [x.key for x in await admin.scheduled("s", partition="s#1")] == [RIGHT, RIGHT]
    assert [(c.subject, c.count) for c in await admin.schedule_counts()] == [("s", 5)]
    assert [(c.subject, c.count) for c in await admin.schedule_counts("s")] == [("s", 5)]
    assert sum(c.count for c in await admin.schedule_counts("s", by="time")) == 5


async def test_a_delayed_message_is_cancelled_on_the_partition_of_its_receipt(
    meta: PlayedMeta, client: plait.Client
) -> None:
    left = await client.send("s", b"l", key=LEFT, delay=3600)
    right = await client.send("s", b"r", key=RIGHT, delay=3600)
    moved = await client.reschedule(right, delay=7200)
    assert (moved.partition, str(moved.partition)) == (right.partition, "s#1@g2")
    async with meta.client() as other:
        # This client has no connection to that broker yet.
        assert await other.cancel(moved)
        assert not await other.cancel(moved)
    [listed] = await client.admin.scheduled("s")
    assert listed.partition == left.partition
    with pytest.raises(plait.InvalidArgument, match="each with numbers of its own"):
        await client.admin.cancel_scheduled("s", listed.number, listed.deliver_at)
    assert await client.admin.cancel_scheduled("s", listed.number, listed.deliver_at, partition="s@g1")
    with pytest.raises(plait.InvalidArgument, match="broker group 'g9' does not exist"):
        await client.cancel(msgspec.structs.replace(left, partition=PartitionName("s", "g9")))


@pytest.mark.parametrize("partition", ["s#2", "s@g2", "", 5])
async def test_an_unknown_partition_is_refused_with_a_list_of_the_known_ones(
    client: plait.Client, partition: str
) -> None:
    with pytest.raises(plait.InvalidArgument, match=r"s@g1, s#1@g2|use 'name@group'"):
        await client.admin.group("s", "g", partition=partition)
