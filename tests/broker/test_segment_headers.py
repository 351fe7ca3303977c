"""A segment header has all definitions, no matter how many of them were encoded ahead."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from plait.broker.groups.group import Group
from plait.broker.partitions import sealing
from plait.broker.partitions.partition import Partition
from plait.broker.recovery import segment_headers as headers
from plait.broker.recovery.segment_headers import SegmentHeaders
from plait.errors import PlaitError
from plait.limits import ServerLimits
from plait.model.retry_policy import Retry
from plait.model.settings import SubjectSettings
from plait.storage.catalog import PartitionRow, read_rows
from plait.storage.logs.action_log import ConsumerDefinition, Definition, GroupDefinition, read_definitions
from plait.storage.logs.log import Log
from plait.storage.logs.recovery import LogScan
from plait.wire.admin.subjects import SetGroup
from tests.broker.schedule_node import SECOND, delay
from tests.broker.stage_node import Task
from tests.support.broker_node import Node, Producer

SUBJECTS = [f"subject-{number}" for number in range(8)]
GROUPS = ("billing", "shipping", "sorted", None)
CLIENTS = ("c1", "c2", "c3")


def header_of(log: Log) -> Iterator[Any]:
    """The frames of the header of the newest segment, as they are on the disk."""
    base, end = log.segments[-1].base, log.segments[-1].header_end
    for offset, frame in LogScan(log, base):
        if offset >= end:
            return
        yield frame


def partitions_in_header(node: Node) -> dict[int, PartitionRow]:
    """Begin a segment of the message log. Returns the partitions that its header defines."""
    log = node.broker.message_log
    log.roll()
    log.write()
    rows = [row for frame in header_of(log) for row in read_rows(frame)]
    assert len({row.id for row in rows}) == len(rows), "each partition is defined once"
    return {row.id: row for row in rows}


def definitions_in_header(node: Node) -> list[Definition]:
    """Begin a segment of the action log. Returns the groups and consumers that its header defines, in order."""
    log = node.broker.action_log
    log.roll()
    log.write()
    return [definition for frame in header_of(log) for definition in read_definitions(frame)]


def check(node: Node) -> None:
    """Check that a segment that begins now has all definitions."""
    partitions = node.broker.partitions
    assert partitions_in_header(node) == {number: partition.row for number, partition in partitions.items()}
    expected: list[Definition] = []
    for partition in partitions.values():
        for group in partition.groups.values():
            expected.append(group.definition)
            expected += [ConsumerDefinition(c.id, group.id, c.client, c.proof) for c in group.consumers.values()]
    found = definitions_in_header(node)
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    named = set()
    for definition in found:
        if isinstance(definition, GroupDefinition):
            named.add(definition.id)
        else:
            assert definition.group in named, "a group is defined before its consumers"


class Life:
    """Random changes of definitions, new segments and encoding ahead, in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        # A group may be created for a consumer above the limit.
        limits = ServerLimits(consumers=8)
        self.node = Node(message_segment_size=1 << 17, action_segment_size=1 << 17, limits=limits)
        self.version = 1
        self.numbers = iter(range(1000, 10_000))
        self.steps: Iterator[None] = iter(())

    def run(self, operations: int = 120) -> None:
        chosen = [
            *[self.attach] * 6,
            *[self.create, self.delete, self.settings, self.detach, self.lose, self.forget, self.retry] * 2,
            *[self.take_over, self.open, self.seal, self.drop, self.delayed, self.stage, self.give_up_stages],
            *[self.delete_group, self.refresh, self.refresh, self.refresh, self.restart],
        ]
        for _ in range(operations):
            try:
                self.rng.choice(chosen)()
            except PlaitError:
                # The operation is not possible now; the test does not depend on it.
                pass
            self.node.turn()
            if self.rng.random() < 0.3:
                check(self.node)
        check(self.node)

    def subject(self) -> str:
        return self.rng.choice(SUBJECTS)

    def group(self) -> Group | None:
        groups = [group for each in self.node.broker.partitions.values() for group in each.groups.values()]
        return self.rng.choice(groups) if groups else None

    def create(self) -> None:
        self.node.broker.create_subject(self.subject())

    def delete(self) -> None:
        self.node.broker.delete_subject(self.subject())

    def settings(self) -> None:
        self.node.broker.catalog.update_subject(
            self.subject(), SubjectSettings(retention_seconds=self.rng.choice((5.0, 60.0)))
        )

    def attach(self) -> None:
        name = self.rng.choice(GROUPS)
        ordered = {"ordered": True, "token": self.rng.choice((0, 5, 6))} if name == "sorted" else {}
        self.node.membership.attach(self.subject(), name, self.rng.choice(CLIENTS), **ordered)

    def take_over(self) -> None:
        """Attach another process with the client id of a valid lease: the earlier consumer is renamed."""
        subject = self.subject()
        first = self.node.membership.attach(subject, "sorted", "taken", ordered=True, token=next(self.numbers))
        self.node.turn()
        self.node.membership.disconnected(first, first.session)
        self.node.membership.attach(subject, "sorted", "taken", ordered=True, token=next(self.numbers))

    def detach(self) -> None:
        group = self.group()
        if group is not None and group.consumers:
            self.node.membership.detach(self.rng.choice(list(group.consumers.values())))

    def lose(self) -> None:
        self.node.clock.advance(60)
        self.node.membership.lose_silent()

    def forget(self) -> None:
        if self.rng.random() < 0.3:
            self.node.clock.advance(self.node.broker.limits.group_forget_seconds)
        self.node.forget_idle()

    def retry(self) -> None:
        group = self.group()
        if group is not None:
            retry, subject = Retry(attempts=self.rng.randint(2, 9)), group.partition.row.subject
            self.node.membership.set_group(
                subject, group.name, SetGroup(subject=subject, group=group.name, retry=retry)
            )

    def delete_group(self) -> None:
        group = self.group()
        if group is not None:
            self.node.membership.delete(group.partition.row.subject, group.name)

    def open(self) -> None:
        self.version += 1
        subject = self.subject()
        lps = [(self.rng.randrange(4) * 100, 500)]
        sealing.open_lps(self.node.broker, subject, subject, lps, self.version, SubjectSettings())

    def seal(self) -> None:
        self.version += 1
        sealing.seal(self.node.broker, self.subject(), [(0, self.rng.randint(1, 900))], self.version, lambda _: None)

    def drop(self) -> None:
        self.version += 1
        subject = self.subject()
        sealing.drop(self.node.broker, subject, subject, self.version)

    def delayed(self) -> None:
        delay(self.node, Producer(next(self.numbers)), self.node.clock.now() + SECOND, b"x", subject=self.subject())

    def stage(self) -> None:
        Task(next(self.numbers), subject=self.subject()).write(self.node, b"x")

    def give_up_stages(self) -> None:
        self.node.clock.advance(self.node.broker.limits.stage_seconds + 1)
        self.node.retention.run()

    def refresh(self) -> None:
        """Run some steps, perhaps of a refresh that began before other changes."""
        for _ in range(self.rng.randint(1, 3)):
            if next(self.steps, self) is self:
                kind = self.rng.choice((headers.ROWS, headers.NAMES))
                self.steps = self.node.broker.segment_headers.refresh_kind(kind)

    def restart(self) -> None:
        self.steps = iter(())
        self.node = self.node.restart() if self.rng.random() < 0.5 else self.node.killed()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "CHUNK_PARTITIONS", 3)
    monkeypatch.setattr(headers, "STEP_CHUNKS", 1)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("seed", range(6))
def test_every_segment_begins_with_all_definitions(seed: int):
    Life(seed).run()


def run_lives(seeds: range) -> None:
    for seed in seeds:
        Life(seed).run()


def unmarked(owner: type, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A defect: the change does not mark the definitions as changed."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        change = getattr(owner, name)

        def naive(self: Any, *given: Any) -> None:
            partition = self if isinstance(self, Partition) else self.partition
            before = partition.definitions
            change(self, *given)
            partition.definitions = before

        patch.setattr(owner, name, naive)

    return plant


def partitions_never_go(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SegmentHeaders, "remove", lambda self, partition: None)


def chunks_are_encoded_once(patch: pytest.MonkeyPatch) -> None:
    refresh = headers.HeaderChunk.refresh

    def naive(self: headers.HeaderChunk, kind: str) -> bool:
        return not self.rows[kind] and refresh(self, kind)

    patch.setattr(headers.HeaderChunk, "refresh", naive)


DEFECTS = {
    **{name: unmarked(Group, name) for name in ("redefine", "add", "remove")},
    **{name: unmarked(Partition, name) for name in ("add_group", "remove_group")},
    "partitions_never_go": partitions_never_go,
    "chunks_are_encoded_once": chunks_are_encoded_once,
}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("defect", DEFECTS.values(), ids=list(DEFECTS))
def test_a_change_that_headers_do_not_include_is_noticed(
    defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    defect(monkeypatch)
    with pytest.raises(AssertionError):
        run_lives(range(6))


def test_a_new_segment_encodes_only_changed_definitions(monkeypatch: pytest.MonkeyPatch):
    node = Node(message_segment_size=1 << 20, action_segment_size=1 << 20)
    for number in range(200):
        node.attach(f"subject-{number}", "g")
    encoded: list[int] = []
    for kind in ("_encode_rows", "_encode_definitions"):
        encode = getattr(headers, kind)
        monkeypatch.setattr(headers, kind, lambda given, encode=encode: encoded.append(len(given)) or encode(given))
    check(node)
    encoded.clear()
    check(node)
    assert encoded == []
    node.attach("subject-7", "another")
    node.broker.catalog.update_subject("subject-9", SubjectSettings(retention_seconds=5.0))
    check(node)
    assert len(encoded) == 2, "one chunk of each kind"
    assert max(encoded) <= headers.CHUNK_PARTITIONS


def test_headers_are_encoded_ahead_once_a_segment_is_half_full():
    node = Node(message_segment_size=1 << 16, action_segment_size=1 << 16)
    node.attach("orders", "g")
    broker = node.broker
    assert list(broker.segment_headers.refresh_steps()) == []
    chunk = next(iter(broker.segment_headers._chunks))
    assert not chunk.rows[headers.ROWS], "nothing is encoded ahead in an empty segment"
    producer = Producer(7)
    while not broker.message_log.half_full:
        node.send("orders", b"x" * 1000, producer=producer)
    before = chunk.rows[headers.NAMES]
    node.attach("orders", "another")
    broker.segment_headers.refresh()
    assert chunk.rows[headers.ROWS]
    assert chunk.rows[headers.NAMES] == before, "the other log is not half full"
    again = next(iter(node.killed().broker.segment_headers._chunks))
    assert again.rows[headers.ROWS], "a start encodes ahead too"
