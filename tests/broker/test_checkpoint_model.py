"""A start from a checkpoint that was copied in many turns gives the state that the logs alone give.

Random operations run between the copies of two shards: sends, delays, stages, groups, subjects that are deleted and
created again. The process then ends at any moment. One start uses the checkpoint, another has none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import msgspec
import pytest

from plait.broker import catalog
from plait.broker.groups.group_settings import GroupFilter, set_group_filter
from plait.broker.partitions import partition as partition_module
from plait.broker.partitions.partition import BEGINNING
from plait.broker.recovery import replay
from plait.broker.recovery import shards as state
from plait.broker.recovery import start_up as recover
from plait.broker.recovery.checkpointer import CheckpointWork
from plait.broker.schedule import delayed_requests
from plait.broker.schedule.bucketed import BucketedRows
from plait.broker.schedule.delayed_requests import list_scheduled
from plait.errors import PlaitError
from plait.model.filter_terms import FilterTerms
from plait.storage.checkpoint import DIRECTORY
from plait.storage.producers import SHARDS, ProducerTable
from tests.broker.ordered_node import NEWEST, keyed
from tests.broker.schedule_node import delayed_frame, run_due, submit
from tests.broker.stage_node import Task, ask, complete
from tests.support.broker_node import Node, Producer

SUBJECTS = ("a", "b", "c", "d")


class Model:
    """A node with producers and consumers, and a checkpoint that runs meanwhile."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.filters = random.Random(f"{seed} filters")
        self.node = Node(flush=self.draw.choice(("sync", "async")))
        self.producers = {subject: Producer(number) for number, subject in enumerate(SUBJECTS, 70)}
        self.tasks = 0
        self.staged: list[Task] = []

    def subject(self) -> str:
        return self.draw.choice(SUBJECTS)

    def send(self) -> None:
        subject = self.subject()
        rows = [(self.draw.choice(("k1", "k2", "")), b"x" * self.draw.randrange(60)) for _ in range(3)]
        keyed(self.node, self.producers[subject], rows, subject)

    def delay(self) -> None:
        subject = self.subject()
        due = self.node.clock.now() + self.draw.randrange(60_000_000)
        submit(self.node, delayed_frame(self.producers[subject], due, b"later", subject=subject))
        self.node.turn()

    def cancel(self) -> None:
        subject = self.subject()
        waiting = waiting_rows(self.node, subject)
        if waiting:
            number, due = self.draw.choice(waiting)
            assert delayed_requests.cancel(self.node.broker, subject, number, due)
            self.node.turn()

    def time(self) -> None:
        self.node.clock.advance(self.draw.random() * 5)
        run_due(self.node)

    def consume(self) -> None:
        subject, group = self.subject(), self.draw.choice(("g", "h"))
        consumer = self.node.attach(subject, group, self.draw.choice(("c1", "c2")))
        if group == "h" and self.filters.random() < 0.3:
            version = consumer.group.definition.filter_version + 1
            terms = self.filters.choice((None, FilterTerms(where="key = 'k1'"), FilterTerms(where="key IS NULL")))
            set_group_filter(self.node.broker, consumer.group, GroupFilter(terms, version=version))
            consumer = self.node.attach(subject, group, consumer.client)
        ranges = self.node.pull(consumer, 5).ranges
        for start, end, _ in ranges:
            what = self.draw.random()
            if what < 0.6:
                self.node.ack(consumer, (start, end))
            elif what < 0.8:
                self.node.nack(consumer, (start, end), delay=self.draw.choice((0.0, 3.0)))
        if self.draw.random() < 0.3:
            self.node.membership.detach(consumer)
            self.node.turn()

    def consume_in_order(self) -> None:
        client = self.draw.choice(("o1", "o2"))
        consumer = self.node.attach(self.subject(), "ordered", client, ordered=True, token=len(client))
        half = self.draw.choice(((0, 512), (512, 1024)))
        self.node.broker.leases.ask(consumer, [(*half, self.node.broker.turn.epoch, 0)], [], [], NEWEST)
        self.node.turn()

    def delete(self) -> None:
        subject = self.subject()
        if subject in self.node.broker.subjects:
            self.node.broker.delete_subject(subject)
            self.node.turn()
            self.producers[subject].last.clear()

    def forget(self) -> None:
        partition = self.node.broker.subjects.get(self.subject())
        if partition is not None and partition.groups:
            self.node.membership.remove_group(self.draw.choice(list(partition.groups.values())))
            self.node.turn()

    def stage(self) -> None:
        self.tasks += 1
        task = Task(1000 + self.tasks, subject=self.subject(), query=f"q{self.tasks}")
        task.write(self.node, b"s1", b"s2")
        complete(self.node, task)
        self.staged.append(task)

    def publish(self) -> None:
        if self.staged:
            ask(self.node, [self.staged.pop()])
            self.node.turn()

    def roll(self) -> None:
        self.node.broker.message_log.roll()
        self.node.broker.action_log.roll()
        self.node.turn()

    def step(self) -> None:
        actions: list[Callable[[], None]] = [self.send, self.consume, self.delay, self.time, self.stage, self.publish]
        actions += [self.send, self.consume, self.consume_in_order, self.cancel, self.delete, self.forget, self.roll]
        try:
            self.draw.choice(actions)()
        except PlaitError:
            # The subject may have been deleted.
            self.node.turn()

    def checkpoint(self) -> None:
        """Make a checkpoint, with operations between its steps."""
        work = self.node.broker.snapshots.begin()
        while work.copy_some(1):
            for _ in range(self.draw.randrange(6)):
                self.step()
        work.run()
        self.node.broker.snapshots.end(work)


def contents(node: Node) -> dict[str, Any]:
    """The state after a start."""
    broker = node.broker
    partitions = {}
    for partition in broker.partitions.values():
        dump = state.dump_partition(partition, 0, 0)
        records = partition.consume_log.slice(0, len(partition.consume_log)).tolist()
        groups = {group.definition.id: progress(group) for group in dump.groups}
        partitions[partition.id] = (dump.row, dump.next, dump.size, dump.epochs, groups, records)
    # The time of the last send to a deleted partition has no effect on later sends.
    entries = msgspec.convert(broker.producers.dump(broker.producers.ids()), list[state.ProducerState])
    producers = {producer: sorted(windows) for producer, _, windows in entries if windows}
    return {
        "subjects": {name: partition.id for name, partition in broker.subjects.items()},
        "partitions": partitions,
        "waiting_count": broker.schedules.count,
        "waiting": {name: waiting_rows(node, name) for name in broker.schedules.by_name},
        "producers": producers,
        "numbers": (broker.catalog.next_partition, broker.catalog.next_group, broker.catalog.next_consumer),
    }


def progress(group: state.GroupState) -> tuple[object, ...]:
    """A group's progress as of its events. Due retries and the last contact of a consumer are not in the log."""
    # What an ordered group delivered is not in the log, so its cursors may differ.
    cursors = [] if group.definition.ordered else group.cursors
    undone = [piece for each in cursors for piece in [*each.returned, *chain(*each.held.values())]]
    undone += [piece for each in cursors for _, ranges in each.waiting for piece in ranges]
    rows = sorted((sequence, each.attempt) for each in undone for sequence in range(each.start, each.end))
    consumers = sorted((consumer.id, consumer.client) for consumer in group.consumers)
    return group.definition, [each.next for each in cursors], rows, consumers, group.failures[:2], group.locks


def waiting_rows(node: Node, subject: str) -> list[tuple[int, int]]:
    """(number, due time) of the waiting rows."""
    if subject not in node.broker.schedules.by_name:
        return []
    page = list_scheduled(node.broker, subject, 0, 1 << 62, None, 1000)
    assert page.next is None
    return sorted((view.number, view.deliver_at) for view in page.rows)


def run(seed: int, steps: int = 40) -> None:
    model = Model(seed)
    for _ in range(steps):
        model.step()
    for _ in range(2):
        model.checkpoint()
    for _ in range(model.draw.randrange(10)):
        model.step()
    clock = model.node.clock.now()
    by_logs = model.node.disk.copy()
    for name in by_logs.list(DIRECTORY):
        by_logs.remove(f"{DIRECTORY}/{name}")
    found, expected = contents(model.node.killed()), contents(Node(by_logs, model.node.clock, model.node.config))
    assert model.node.clock.now() == clock
    for part, value in expected.items():
        assert found[part] == value, part


def run_all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        run(seed)


def copy_with_the_first_position(patch: pytest.MonkeyPatch) -> None:
    """Shards have no positions of their own: recovery replays all frames since the checkpoint began."""
    copy = CheckpointWork._copy_partitions
    patch.setattr(CheckpointWork, "_copy_partitions", lambda self, shard, position: copy(self, shard, BEGINNING))


def number_delayed_rows_from_their_shard_on(patch: pytest.MonkeyPatch) -> None:
    """Delayed rows stored between the beginning of the checkpoint and the copy of their shard count as bucketed."""
    patch.setattr(BucketedRows, "begin_at", lambda self, offset: None)


def load_in_any_order(patch: pytest.MonkeyPatch) -> None:
    """A deleted partition takes the name of the one that was created after it."""
    patch.setattr(recover, "sorted", lambda entries, key: list(entries)[::-1], raising=False)


def store_producers_again(patch: pytest.MonkeyPatch) -> None:
    """Recovery replays frames to producers that include them."""
    order = ProducerTable.order

    def naive(self: ProducerTable) -> None:
        order(self)
        self.loaded_until = [0] * SHARDS

    patch.setattr(ProducerTable, "order", naive)


def keep_rows_of_the_deleted(patch: pytest.MonkeyPatch) -> None:
    """Buckets keep rows of a subject that was deleted before its shard was copied."""
    patch.setattr(BucketedRows, "_drop_unknown_runs", lambda self: None)


DEFECTS = [
    keep_rows_of_the_deleted,
    copy_with_the_first_position,
    number_delayed_rows_from_their_shard_on,
    load_in_any_order,
    store_producers_again,
]


@pytest.fixture(autouse=True)
def _few_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use few shards, so that new partitions enter shards that are being copied."""
    for module in (partition_module, catalog, replay):
        monkeypatch.setattr(module, "SHARDS", 5)


@pytest.mark.parametrize("seed", range(30))
def test_a_checkpoint_with_the_logs_after_it_gives_the_state_of_the_logs_alone(seed: int):
    run(seed)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_the_model_notices(defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    defect(monkeypatch)
    with pytest.raises(AssertionError):
        run_all(range(30))


@pytest.mark.deep("crash")
@pytest.mark.parametrize("number", range(400))
def test_many_more_seeds(seed: int, number: int):
    run(seed * 1_000 + 100 + number)
