"""Messages stored after a fence, twice, or out of sending order; and order across route changes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from plait.client.send.open_rows import hash_keys
from plait.frame.builder import build_frame, pack_stamp
from plait.frame.columns import Column
from plait.frame.view import FrameView
from plait.model.logical_partitions import lp_of_key
from plait.spark.auditing.job import open_input
from plait.spark.auditing.stored_order import astray
from plait.spark.inputs import log_audit as live
from plait.spark.inputs.log_audit import cover
from plait.spark.runtime.job_runner import NoProgress
from plait.storage.catalog import PartitionRow
from plait.storage.logs.action_events import Action
from plait.storage.reading.log_chunks import WantedRows
from plait.storage.reading.log_reader import open_log
from plait.storage.reading.log_walk import LogWalk
from plait.testing import EmbeddedBroker
from tests.spark.archives import archive_here
from tests.spark.auditing.conftest import Audit, one_group
from tests.spark.auditing.defects import Events, copied, frames_of, undurable, with_actions, write
from tests.spark.auditing.test_live import SUBJECT, consume

KEYS = [f"k-{number}" for number in range(12)]


async def grown(data: Path, before: int, after: int) -> None:
    """A subject whose number of partitions changes, with an ordered group that has acked all messages."""
    async with EmbeddedBroker(data) as broker, broker.connect() as client:
        await client.admin.create_subject(SUBJECT, partitions=before, order="strict")
        async with client.consumer(SUBJECT, group="billing", ordered=True) as consumer:

            async def once() -> set[str]:
                """Send and ack one message of each key, one by one; returns the partitions they went to."""
                used = set()
                for key in KEYS:
                    used.add(str((await client.send(SUBJECT, b"x", key=key)).partition))
                    await consume(consumer, 1)
                return used

            first = await once()
            if after != before:
                await client.admin.expand_subject(SUBJECT, after)
                while len(await once()) == len(first):
                    pass


def partitions_of(data: Path) -> dict[str, PartitionRow]:
    walk = LogWalk(open_log(str(data)))
    cover(walk, WantedRows(prefixes=("",)))
    return {row.name: row for row in walk.partitions.values() if row.subject == SUBJECT and not row.kind}


def key_of(frame: FrameView) -> str:
    return frame.binary(Column.KEY)[0].as_py().decode() if frame.has(Column.KEY) else ""


def groups_of(data: Path) -> dict[int, int]:
    """Partition → the number of its group."""
    source = open_input(data, None, progress=NoProgress())
    return {group.partition: group.id for group in source.groups.values()}


def plant(data: Path, target: Path, *rows: tuple[PartitionRow, str, int]) -> None:
    """Add messages (partition, key, producer sequence of producer 99) at the end of the log."""
    copied(data, target)
    shutil.rmtree(target / "message")
    frames = frames_of(data, "message")
    nexts = {frame.partition: frame.base + frame.count for frame in frames}
    made = []
    for row, key, number in rows:
        hashes = hash_keys([key], 1) if key else None
        parts = build_frame([b"planted"], producer=99, first=number, keys=[key] if key else None, key_hashes=hashes)
        base = nexts.get(row.id, 0)
        nexts[row.id] = base + 1
        parts.stamp_with(pack_stamp(row.id, base, frames[-1].store_time, 0, frames[-1].epoch))
        made.append(FrameView(memoryview(parts.tobytes()), 0))
    write(target, "message", undurable([*frames, *made]))


@pytest.fixture(params=["one block", "many blocks", "archive"])
def audited(request: pytest.FixtureRequest, audit: Audit, monkeypatch: pytest.MonkeyPatch) -> Audit:
    if request.param == "many blocks":
        monkeypatch.setattr(live, "BLOCK_SIZE", 1)
    if request.param != "archive":
        return audit

    def archived(data: Path) -> object:
        to = data.with_name(f"{data.name}-archive")
        archive_here(data, to, now=True)
        return audit(archive=to)

    return archived  # type: ignore[return-value]


async def test_rows_behind_a_fence_are_found(tmp_path: Path, audited: Audit):
    """Delayed messages were stored like this if their LP moved before they were due."""
    await grown(tmp_path / "keys", 1, 3)
    assert audited(tmp_path / "keys").held
    old = partitions_of(tmp_path / "keys")[SUBJECT]
    moved = [key for key in KEYS if any(first <= lp_of_key(key) < end for first, end, _ in old.fences)]
    stays = next(key for key in KEYS if key not in moved)
    plant(tmp_path / "keys", tmp_path / "bad", (old, moved[0], 1), (old, stays, 2), (old, moved[1], 3))
    report = audited(tmp_path / "bad")
    assert not report.held
    (subject,) = report.subjects
    assert (subject.behind_fence, subject.broken) == (2, ["behind_fence"])
    assert [(each.promise, each.partition) for each in subject.examples] == [("behind_fence", f"{SUBJECT}@g1")] * 2


@pytest.mark.parametrize("other", [False, True], ids=["in its partition", "in another"])
async def test_a_message_id_that_is_stored_twice_is_found(tmp_path: Path, audited: Audit, other: bool):
    await grown(tmp_path / "good", 2, 2)
    row, elsewhere = partitions_of(tmp_path / "good").values()
    plant(tmp_path / "good", tmp_path / "bad", (row, "", 7), (row, "", 8), (elsewhere if other else row, "", 7))
    (subject,) = audited(tmp_path / "bad").subjects
    assert (subject.stored_twice, subject.broken) == (1, ["stored_twice"])


@pytest.mark.parametrize("keys", ["one", "two"])
async def test_messages_of_a_key_that_are_stored_out_of_sending_order_are_found(
    tmp_path: Path, audit: Audit, keys: str, monkeypatch: pytest.MonkeyPatch
):
    await grown(tmp_path / "good", 1, 1)
    (row,) = partitions_of(tmp_path / "good").values()
    plant(tmp_path / "good", tmp_path / "bad", (row, "k-1", 8), (row, "k-1" if keys == "one" else "k-2", 7))
    for size in (live.BLOCK_SIZE, 1):
        monkeypatch.setattr(live, "BLOCK_SIZE", size)
        (subject,) = audit(tmp_path / "bad").subjects
        assert subject.stored_out_of_order == (1 if keys == "one" else 0)
        assert subject.broken == (["stored_out_of_order"] if keys == "one" else [])


async def test_a_delayed_message_may_be_stored_after_later_sends(tmp_path: Path, audit: Audit):
    async with EmbeddedBroker(tmp_path) as broker, broker.connect() as client:
        await client.admin.create_subject(SUBJECT, order="strict")
        await client.send(SUBJECT, b"later", key="k", delay=0.05)
        await client.send(SUBJECT, b"now", key="k")
        async with client.consumer(SUBJECT, group="billing", ordered=True) as consumer:
            assert [message.body for message in await consume(consumer, 2)] == [b"now", b"later"]
    assert audit(tmp_path).held


async def test_order_is_judged_across_route_changes(tmp_path: Path, audit: Audit, monkeypatch: pytest.MonkeyPatch):
    """An ack in the partition that a key moved to, before the ack of an earlier message in its old partition."""
    await grown(tmp_path / "good", 1, 3)
    rows, groups = partitions_of(tmp_path / "good"), groups_of(tmp_path / "good")
    old = rows[SUBJECT].id
    stored = [(frame.partition, frame.base, key_of(frame)) for frame in frames_of(tmp_path / "good", "message")]
    new, at, key = next(each for each in stored if each[0] in groups and each[0] != old)
    before = max(base for partition, base, name in stored if partition == old and name == key)
    one, other = (groups[old], before), (groups[new], at)

    def change(events: Events) -> Events:
        acks = events["action"] == Action.ACK
        mine = [acks & (events["group"] == group) & (events["start"] == at) for group, at in (one, other)]
        for chosen, (group, at) in zip(mine, (other, one), strict=True):
            cursors = np.unique(events["holder"][acks & (events["group"] == group)])
            events["group"][chosen], events["start"][chosen], events["end"][chosen] = group, at, at + 1
            if chosen.any() and len(cursors):
                events["holder"][chosen] = cursors[0]
        return events

    with_actions(tmp_path / "good", tmp_path / "bad", change)
    for size in (live.BLOCK_SIZE, 1):
        monkeypatch.setattr(live, "BLOCK_SIZE", size)
        assert audit(tmp_path / "good").held
        group = one_group(audit(tmp_path / "bad"))
        assert (group.out_of_order, group.broken) == (1, ["out_of_order"])


def test_the_lps_that_a_partition_took_at_each_sequence_are_known():
    sequences, lps = np.arange(6), np.array([1, 2, 1, 2, 1, 2], np.uint16)
    assert not astray(sequences, lps, [], []).any()
    assert not astray(sequences, lps, [(0, [(0, 1024)])], []).any()
    # The partition gave up LP 2, and took it again from sequence 4 on.
    found = astray(sequences, lps, [(0, [(0, 1024)]), (2, [(0, 2), (3, 1024)]), (4, [(0, 1024)])], [])
    assert found.tolist() == [False, False, False, True, False, False]
    found = astray(sequences, lps, [], [(1, 2, 3)])
    assert found.tolist() == [False, False, False, False, True, False]
