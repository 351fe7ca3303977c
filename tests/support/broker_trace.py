"""A random but repeatable run of one broker, and what its clients observe.

``Trace.run`` performs operations drawn from a seed: sends from several producers, pulls, acks, nacks, consumers that
attach and detach, checkpoints, retention, a clean restart. ``Trace.observed`` is what the clients know at any moment:
what they requested and what was acknowledged. ``broker_checker`` compares it with the disk that a crash left.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from plait.broker import BrokerConfig
from plait.broker.groups.dead_letters import Choice
from plait.broker.groups.group import AttachedConsumer, NackOutcome
from plait.clock import ManualClock
from plait.errors import GroupBusy
from plait.frame.builder import build_frame
from plait.model.reason import Reason
from plait.model.settings import SubjectSettings
from plait.storage.checkpoint import KEEP
from plait.testing.simulated_disk import SimulatedDisk
from tests.support.broker_node import (
    NO_WATERMARKS,
    SMALL_SEGMENTS,
    Node,
    Producer,
    Pulled,
    Sent,
    retention_steps,
)

SUBJECTS = ("orders", "audit", "short")
#: A subject with a short retention, so that rows expire.
SHORT_SUBJECT = "short"
#: Dead letters expire after this; their copies fill several small segments.
DEAD_SECONDS = 50.0
GROUPS: dict[str, dict[str, Any]] = {
    "billing": {},
    "shipping": {"start": "latest"},
    "once": {"delivery": "at_most_once"},
}


@dataclass
class GroupObserved:
    """What was requested and acknowledged for one group of one subject."""

    start: int
    delivery: str
    #: True if the group must exist after every crash.
    durable: bool = False
    ack_asked: set[int] = field(default_factory=set)
    ack_acknowledged: set[int] = field(default_factory=set)
    #: Sequences of rows that a consumer rejected: they may be dead letters.
    rejected: set[int] = field(default_factory=set)
    #: Sequences of dead letters that may have expired.
    forgotten: set[int] = field(default_factory=set)
    #: Sequences of rows that a consumer received.
    handed: set[int] = field(default_factory=set)
    #: The broker may have recorded a delivery of any row below this sequence.
    taken_until: int = 0

    @property
    def done(self) -> set[int]:
        """Sequences of rows that must not be delivered again."""
        return self.handed if self.delivery == "at_most_once" else self.ack_acknowledged

    @property
    def doubtful(self) -> set[int]:
        """Sequences of rows that the broker may treat as done: an ack or a delivery may or may not have been stored."""
        return set(range(self.taken_until)) if self.delivery == "at_most_once" else self.ack_asked


@dataclass
class Observed:
    """What the clients of a trace know."""

    #: (producer, number) → (subject, body) of everything ever submitted.
    rows: dict[tuple[int, int], tuple[str, bytes]] = field(default_factory=dict)
    #: Every frame submitted, in order.
    frames: list[Sent] = field(default_factory=list)
    #: Frames with the producer sequences of acknowledged rows, but other contents.
    forged: list[Sent] = field(default_factory=list)
    groups: dict[tuple[str, str], GroupObserved] = field(default_factory=dict)
    #: Subject → sequence: retention may have removed rows below it.
    expired: dict[str, int] = field(default_factory=dict)
    #: Temporary subject → True if it must exist, False if it must not, None while it is created or deleted.
    subjects: dict[str, bool | None] = field(default_factory=dict)
    #: The data epoch of the running broker; 0 while the broker stops or starts.
    epoch: int = 0

    #: Frames that were acknowledged before a successful sync began.
    durable_frames: set[Sent] = field(default_factory=set)

    @property
    def unacknowledged(self) -> list[Sent]:
        return [frame for frame in self.frames if not frame.acknowledged]


class Trace:
    """Performs the operations, and records what clients observe."""

    def __init__(self, seed: int, flush: str, disk: SimulatedDisk, *, operations: int = 200) -> None:
        self._rng = random.Random(seed)
        self._settings = random.Random(f"{seed} settings")
        self._operations = operations
        self.observed = Observed()
        self.clock = ManualClock()
        self.config = BrokerConfig(
            flush=flush,  # type: ignore[arg-type]
            retention_seconds=150.0,
            dead_seconds=DEAD_SECONDS,
            **{**SMALL_SEGMENTS, **NO_WATERMARKS, "retained_segment_size": 1024},
        )
        self.disk = disk
        self._producers = [Producer(number) for number in (101, 102, 103)]
        #: Sends to subjects that are deleted later.
        self._passing = Producer(104)
        self._consumers: list[AttachedConsumer] = []
        #: The rows in flight, as (consumer, ranges).
        self._held: list[tuple[AttachedConsumer, list[tuple[int, int, int]]]] = []
        self._clients = 0
        self.performed: dict[str, int] = {}
        #: The number of segments of the message log that retention deleted.
        self.removed = 0

    def run(self) -> None:
        self._start()
        self.node.broker.create_subject(SHORT_SUBJECT, SubjectSettings(retention_seconds=60.0))
        weights = {
            self._send_one: 30,
            self._send_batch: 12,
            self._send_burst: 16,
            self._send_large: 4,
            self._forge: 2,
            self._attach: 8,
            self._pull: 34,
            self._ack: 30,
            self._nack: 6,
            self._grow_old: 2,
            self._resend: 2,
            self._detach: 3,
            self._lose: 3,
            self._commit_only: 10,
            self._checkpoint: 7,
            self._slow_checkpoint: 2,
            self._checkpoint_step: 20,
            self._expire: 6,
            self._prepare: 4,
            self._note: 4,
            self._reattach: 4,
            self._make_subject: 4,
            self._delete_subject: 4,
        }
        chosen = self._rng.choices(list(weights), list(weights.values()), k=self._operations - 1)
        chosen.insert(self._operations * 2 // 3, self._restart)
        for operation in chosen:
            name = operation.__name__
            self.performed[name] = self.performed.get(name, 0) + 1
            operation()
            self.clock.advance(self._rng.random())
            self.node.broker.run_timers()
            if self._rng.random() < 0.8:
                self._turn()
        self._turn()

    # --- turns ----------------------------------------------------------------------------------

    def _start(self) -> None:
        self.observed.epoch = 0
        self.node = Node(self.disk, self.clock, self.config)
        self.observed.epoch = self.node.broker.turn.epoch
        self._consumers, self._held = [], []

    def _turn(self) -> None:
        self.node.turn()
        if self.config.flush == "async" and self._rng.random() < 0.3:
            acknowledged = [frame for frame in self.observed.frames if frame.acknowledged]
            self.node.sync()
            self.observed.durable_frames.update(acknowledged)
        log = self.node.broker.action_log
        if log.durable == log.end:
            for group in self.observed.groups.values():
                group.durable = True
        if self.node.broker.message_log.durable == self.node.broker.message_log.end:
            for subject in self.observed.subjects:
                self.observed.subjects[subject] = subject in self.node.broker.subjects

    def look(self) -> Observed:
        """What clients have observed at this moment, possibly during an operation."""
        for (subject, name), group_seen in self.observed.groups.items():
            group = self.node.broker.subjects[subject].groups.get(name)
            if group is not None:
                group_seen.taken_until = max(group_seen.taken_until, group.cursor.next)
        return self.observed

    def _commit_only(self) -> None:
        self.node.commit()

    def _checkpoint(self) -> None:
        self.node.checkpoint()

    def _slow_checkpoint(self) -> None:
        """Make a checkpoint, with operations while its shards are copied and while its files are written."""
        work = self.node.broker.snapshots.begin()
        while work.copy_some(1):
            self._send_one()
            self._pull()
            self.node.commit()
        self._ack()
        self.node.commit()
        work.run()
        self._send_one()
        self.node.broker.snapshots.end(work)

    def _checkpoint_step(self) -> None:
        self.node.checkpoint_step()

    def _prepare(self) -> None:
        self.node.broker.message_log.prepare_next()
        self.node.broker.action_log.prepare_next()

    def _note(self) -> None:
        """Do what a server does every second."""
        for log in self.node.broker.logs:
            log.note_durable()
        self.node.broker.segment_headers.refresh()

    def _restart(self) -> None:
        self._turn()
        self.observed.epoch = 0
        self.node.broker.stop()
        self._start()

    # --- sends ----------------------------------------------------------------------------------

    def _submit(self, producer: Producer, subject: str, count: int, size_max: int = 120, **columns: Any) -> None:
        rng = self._rng
        bodies = [
            f"{producer.id}/{producer.next + row}:".encode() + rng.randbytes(rng.randrange(size_max))
            for row in range(count)
        ]
        first = producer.next
        frame = producer.frame(subject, *bodies, **columns)
        for row, body in enumerate(bodies):
            self.observed.rows[producer.id, first + row] = (subject, body)
        self.observed.frames.append(frame)
        self.node.submit(frame)

    def _subject(self) -> str:
        return self._rng.choices(SUBJECTS, (6, 2, 2))[0]

    def _send_one(self) -> None:
        self._submit(self._rng.choice(self._producers), self._subject(), 1)

    def _send_batch(self) -> None:
        self._submit(self._rng.choice(self._producers), self._subject(), self._rng.randint(2, 8))

    def _send_burst(self) -> None:
        """Several producers send several frames each in one turn. The broker joins some of these frames."""
        for _ in range(self._rng.randint(2, 6)):
            timed = {"send_time": self.clock.now()} if self._rng.random() < 0.4 else {}
            self._submit(self._rng.choice(self._producers), self._subject(), self._rng.randint(1, 3), **timed)

    def _send_large(self) -> None:
        self._submit(self._rng.choice(self._producers), "orders", 2, 2500)

    def _forge(self) -> None:
        """Send under a producer id that another process read from a message."""
        stored = [frame for frame in self.observed.frames[-40:] if frame.acknowledged]
        if stored:
            real = self._rng.choice(stored)
            view = real.view
            bodies = [body[:-1] + b"!" for body in real.bodies]
            parts = build_frame(bodies, producer=view.producer, first=view.first, previous=view.previous)
            forged = Sent(real.subject, parts.tobytes(), bodies)
            self.observed.forged.append(forged)
            self.node.submit(forged)

    # --- consumers ------------------------------------------------------------------------------

    def _attach(self) -> None:
        subject = self._subject()
        name = self._rng.choice([*GROUPS, None])
        if name is None and self._rng.random() < 0.5:
            return
        self._clients += 1
        client = f"c{self._clients}" if name else f"b{self._clients % 2}"
        settings = GROUPS[name] if name else {"start": "earliest"}
        try:
            consumer = self.node.membership.attach(subject, name, client, **settings)
        except GroupBusy:
            return
        group = consumer.group
        known = (subject, group.name)
        if known not in self.observed.groups:
            self.observed.groups[known] = GroupObserved(group.definition.start, group.definition.delivery)
        self._consumers.append(consumer)

    def _pull(self) -> None:
        if not self._consumers:
            self._attach()
            return
        consumer = self._rng.choice(self._consumers)
        group = consumer.group
        group_seen = self.observed.groups[group.partition.row.subject, group.name]
        pulled = Pulled()

        def answer(delivery: Any) -> None:
            pulled.answer(delivery)
            if delivery is not None:
                for start, end, _ in delivery.ranges:
                    group_seen.handed.update(range(start, end))
                if group.definition.delivery == "at_least_once":
                    self._held.append((consumer, self._epoch_ranges(consumer, pulled)))

        wait = 5.0 if self._rng.random() < 0.2 else 0.0
        self.node.broker.pull(consumer, self._rng.randint(1, 12), 4096, wait, answer)

    @staticmethod
    def _epoch_ranges(consumer: AttachedConsumer, pulled: Pulled) -> list[tuple[int, int, int]]:
        return [(row.sequence, row.sequence + 1, row.epoch) for row in pulled.rows]

    def _ack(self) -> None:
        if not self._held:
            self._pull()
            return
        consumer, rows = self._held.pop(self._rng.randrange(len(self._held)))
        if consumer not in self._consumers:
            return
        rows = [row for row in rows if self._rng.random() < 0.9]
        group_seen = self.observed.groups[consumer.group.partition.row.subject, consumer.group.name]
        sequences = {start for start, _, _ in rows}
        group_seen.ack_asked |= sequences
        self.node.broker.ack(consumer, rows, lambda: group_seen.ack_acknowledged.update(sequences))

    def _nack(self, *, rejected: bool = False) -> None:
        if not self._held:
            return
        consumer, rows = self._held.pop(self._rng.randrange(len(self._held)))
        if consumer in self._consumers:
            delay, reject = (
                (None, True)
                if rejected
                else self._rng.choice([(0.0, False), (0.0, False), (0.5, False), (None, False), (None, True)])
            )
            group_seen = self.observed.groups[consumer.group.partition.row.subject, consumer.group.name]
            group_seen.rejected |= {start for start, _, _ in rows} if reject else set()
            self.node.broker.nack(consumer, rows, None, NackOutcome(delay, Reason("Broken"), reject))

    def _resend(self) -> None:
        groups = [c.group for c in self._consumers if c.group.failures.dead]
        if groups:
            group = self._rng.choice(groups)
            letters, _ = self.node.broker.dead_letters.page(group, Choice(), -1, 5)
            self.node.broker.dead_letters.resend(group, letters)

    def _detach(self) -> None:
        if self._consumers:
            consumer = self._consumers.pop(self._rng.randrange(len(self._consumers)))
            self.node.membership.detach(consumer)

    def _lose(self) -> None:
        """Lose a consumer: it is silent for too long, while the others send heartbeats."""
        if not self._consumers:
            return
        silent = self._rng.choice(self._consumers)
        self.clock.advance(self.node.broker.limits.consumer_lost_seconds + 1)
        for consumer in self._consumers:
            if consumer is not silent:
                consumer.last_contact = self.clock.monotonic()
        for lost, _ in self.node.membership.lose_silent():
            assert lost.client not in lost.group.consumers, "a lost consumer is still attached"
            if lost in self._consumers:
                self._consumers.remove(lost)

    def _reattach(self) -> None:
        """Break a connection. The client reconnects and reports the rows that it holds."""
        if not self._held:
            return
        consumer = self._rng.choice(self._held)[0]
        if consumer not in self._consumers:
            return
        group = consumer.group
        holds = [row for other, rows in self._held if other is consumer for row in rows]
        self.node.membership.disconnected(consumer, consumer.session)
        name = None if group.definition.broadcast else group.name
        again = self.node.membership.attach(
            group.partition.row.subject, name, consumer.client, delivery=group.definition.delivery, holds=holds
        )
        assert again is consumer

    # --- the rest -------------------------------------------------------------------------------

    def _make_subject(self) -> None:
        subject = f"temporary-{len(self.observed.subjects)}"
        self.observed.subjects[subject] = None
        self.node.membership.attach(subject, "g", "c")
        # Its files must be deleted with it. The send is one-way.
        number, body = self._passing.next, b"row of a temporary subject"
        self.observed.rows[self._passing.id, number] = (subject, body)
        self.node.broker.submit(self.node.partition(subject), self._passing.oneway(subject, body).view, None)

    def _delete_subject(self) -> None:
        there = [subject for subject in self.observed.subjects if subject in self.node.broker.subjects]
        if there:
            subject = self._rng.choice(there)
            self.observed.subjects[subject] = None
            self.node.broker.delete_subject(subject)

    def _meanwhile(self) -> None:
        """Run an operation between two steps of retention. It uses another random source, ``_settings``."""
        choice = self._settings.random()
        if choice < 0.2:
            self._rng, other = self._settings, self._rng
            self._send_one()
            self._rng = other
        elif choice < 0.3:
            self.node.commit()
        elif choice < 0.4:
            self.node.checkpoint()
        elif choice < 0.45:
            self._make_subject()

    def _grow_old(self) -> None:
        """Reject messages, so that all kept checkpoints have them as dead letters before they expire."""
        for _ in range(3):
            self._pull()
            self._nack(rejected=True)
        self._turn()
        for _ in range(KEEP):
            self._send_one()
            self.node.checkpoint()
        self.clock.advance(DEAD_SECONDS)
        self._expire()

    def _expire(self) -> None:
        self.clock.advance(self._rng.choice((5, 40)))
        if self._settings.random() < 0.3:
            # An operator changes the subject's retention.
            kept = SubjectSettings(retention_seconds=self._settings.choice((5.0, 60.0, 150.0, None)))
            subject = self._settings.choice(SUBJECTS)
            if subject in self.node.broker.subjects:
                self.node.broker.catalog.update_subject(subject, kept)
        partitions = self.node.broker.partitions.values()
        # Record it before the operation, because the crash may come during the operation.
        self.observed.expired = {partition.row.subject: partition.visible for partition in partitions}
        for group in self.observed.groups.values():
            group.forgotten |= group.rejected
        for removed in retention_steps(self.node.retention):
            self.removed += len(removed)
            self._meanwhile()
        self.observed.expired = {partition.row.subject: partition.start for partition in partitions}
        for consumer in self._consumers:
            consumer.last_contact = self.clock.monotonic()
