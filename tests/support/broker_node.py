"""A broker that a test controls step by step: Plait's own classes with a simulated disk and clock.

Nothing happens in the background. ``turn`` does what a server does at the end of a loop turn: it commits, and syncs if
a request waits for the sync. ``restart``, ``killed`` and ``power_lost`` end a node and return the next one.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from plait.broker import Attachments, Broker, BrokerConfig, Retention
from plait.broker.groups.group import AttachedConsumer, Group, NackOutcome
from plait.broker.partitions.partition import Delivery, Partition, ReadBatch
from plait.clock import ManualClock
from plait.errors import PlaitError
from plait.frame.builder import Buffer, build_frame
from plait.frame.columns import Column
from plait.frame.header import FLAG_UNSEQUENCED
from plait.frame.view import FrameView, frames_in
from plait.storage.checkpoint import DIRECTORY as CHECKPOINTS
from plait.storage.disk import Disk
from plait.testing.cached_file import Keep
from plait.testing.simulated_disk import SimulatedDisk

#: Small enough that a few dozen messages fill several segments.
SMALL_SEGMENTS = {"message_segment_size": 8192, "action_segment_size": 4096, "retained_segment_size": 4096}
NO_WATERMARKS = {"disk_free_min": 0, "disk_used_max": 1.0}


class Row(NamedTuple):
    """A message as a consumer gets it."""

    sequence: int
    producer: int
    number: int
    body: bytes
    epoch: int


def rows_of(parts: Sequence[Buffer]) -> list[Row]:
    """All messages of consecutive frames; every frame is verified."""
    return [row for frame in frames_in(b"".join(parts)) for row in _rows_of_frame(bytes(frame.buffer))]


# An exploration reads the same frames after every crash.
@functools.lru_cache(maxsize=10_000)
def _rows_of_frame(data: bytes) -> list[Row]:
    frame = FrameView(data).verify()
    producers, numbers = frame.message_ids()
    sequences, bodies = frame.sequences().tolist(), frame.binary(Column.BODY).to_pylist()
    columns = zip(sequences, producers.tolist(), numbers.tolist(), bodies, strict=True)
    return [Row(*values, frame.epoch) for values in columns]


def retention_steps(retention: Retention) -> Iterator[list[int]]:
    """Run a pass of retention step by step; yields the bases of the segments that each step deleted."""
    steps = retention.steps()
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            yield ended.value
            return
        yield []


class Sent:
    """A submitted frame and its outcome."""

    def __init__(self, subject: str, data: bytes, bodies: Sequence[bytes]) -> None:
        self.subject = subject
        self.data = data
        self.bodies = list(bodies)
        self.view = FrameView(data)
        self.answers: list[tuple[int | None, PlaitError | None]] = []

    def answer(self, sequence: int | None, error: PlaitError | None) -> None:
        self.answers.append((sequence, error))

    @property
    def acknowledged(self) -> bool:
        return bool(self.answers) and self.answers[-1][1] is None

    @property
    def sequence(self) -> int | None:
        """The receipt; the send must have succeeded."""
        assert self.answers, "no answer yet"
        sequence, error = self.answers[-1]
        assert error is None, error
        return sequence

    @property
    def error(self) -> PlaitError:
        """The refusal; the send must have failed."""
        assert self.answers, "no answer yet"
        error = self.answers[-1][1]
        assert error is not None, "the send was acknowledged"
        return error


class Producer:
    """Numbers rows over all subjects, as a client does. Each frame names the frame before it in its subject."""

    def __init__(self, number: int) -> None:
        self.id = number
        self.next = 1
        self.last: dict[str, int] = {}

    def frame(self, subject: str, *bodies: bytes, **columns: Any) -> Sent:
        """The next frame for a subject."""
        previous = self.last.get(subject, 0)
        parts = build_frame(bodies, producer=self.id, first=self.next, previous=previous, **columns)
        self.next += len(bodies)
        self.last[subject] = self.next - 1
        return Sent(subject, parts.tobytes(), bodies)

    def oneway(self, subject: str, *bodies: bytes) -> Sent:
        parts = build_frame(bodies, producer=self.id, first=self.next, flags=FLAG_UNSEQUENCED)
        self.next += len(bodies)
        return Sent(subject, parts.tobytes(), bodies)


class Pulled:
    """A pull and its answer."""

    def __init__(self) -> None:
        self.answers: list[Delivery | None] = []

    def answer(self, delivery: Delivery | None) -> None:
        # Copied now, because the parts are views of the log.
        if delivery is not None:
            delivery.parts = [bytes(part) for part in delivery.parts]
        self.answers.append(delivery)

    @property
    def answered(self) -> bool:
        return bool(self.answers)

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        assert len(self.answers) == 1, f"{len(self.answers)} answers"
        return self.answers[0].ranges if self.answers[0] is not None else []

    @property
    def rows(self) -> list[Row]:
        assert len(self.answers) == 1, f"{len(self.answers)} answers"
        return rows_of(self.answers[0].parts) if self.answers[0] is not None else []

    @property
    def counts(self) -> list[int]:
        """How many rows each frame of the answer has."""
        [delivery] = self.answers
        return [frame.count for frame in frames_in(b"".join(delivery.parts))] if delivery is not None else []

    @property
    def bodies(self) -> list[bytes]:
        return [row.body for row in self.rows]


class ReadAnswer:
    """A read without a group, and its answers."""

    def __init__(self) -> None:
        self.answers: list[ReadBatch | None] = []

    def answer(self, batch: ReadBatch | None) -> None:
        self.answers.append(batch)


class Node:
    """One start of a broker."""

    def __init__(
        self,
        disk: Disk | None = None,
        clock: ManualClock | None = None,
        config: BrokerConfig | None = None,
        **settings: Any,
    ) -> None:
        self.disk: Any = disk if disk is not None else SimulatedDisk()
        self.clock = clock or ManualClock()
        self.config = config or BrokerConfig(**{**SMALL_SEGMENTS, **NO_WATERMARKS, **settings})
        self.broker = Broker(self.disk, self.clock, self.config)
        self.report = self.broker.start()
        self.membership = Attachments(self.broker)
        # Each step of retention processes one partition.
        self.retention = Retention(self.broker, step_cost=1)
        self._own = Producer(1)

    # --- turns ----------------------------------------------------------------------------------

    def commit(self) -> None:
        self.broker.turn.commit()

    def sync(self) -> None:
        """Sync as the server does: a failure stops the broker."""
        work = self.broker.turn.begin_sync()
        try:
            work.run()
        except OSError as error:
            self.broker.turn.storage_failed(error)
        else:
            self.broker.turn.end_sync(work)

    def turn(self) -> None:
        """End the loop turn, and the turns that it causes."""
        self.broker.turn.commit()
        while self.broker.turn.sync_wanted and self.broker.turn.failed is None:
            self.sync()
            self.broker.turn.commit()
        while self.broker.turn.scans.budget.begun:
            self.broker.turn.scans.next_turn()

    def later(self, seconds: float) -> None:
        """Let time pass, and process everything that is due."""
        self.clock.advance(seconds)
        self.broker.run_timers()
        self.turn()

    # --- sending --------------------------------------------------------------------------------

    def submit(self, sent: Sent) -> Sent:
        """Submit a frame to the broker; an immediate refusal counts as an answer."""
        try:
            self.broker.submit(self.partition(sent.subject), sent.view, sent.answer)
        except PlaitError as error:
            sent.answer(None, error)
        return sent

    def send(self, subject: str, *bodies: bytes, producer: Producer | None = None) -> Sent:
        """Send one frame and finish the turn."""
        sent = self.submit((producer or self._own).frame(subject, *bodies))
        self.turn()
        return sent

    # --- consuming ------------------------------------------------------------------------------

    def attach(self, subject: str, group: str | None, client: str = "c1", **settings: Any) -> AttachedConsumer:
        consumer = self.membership.attach(subject, group, client, **settings)
        self.turn()
        return consumer

    def pull(self, consumer: AttachedConsumer, count: int = 1000, size: int = 1 << 20, wait: float = 0) -> Pulled:
        """Pull, and finish the turn."""
        pulled = Pulled()
        self.broker.pull(consumer, count, size, wait, pulled.answer)
        self.turn()
        return pulled

    def ack(self, consumer: AttachedConsumer, *ranges: tuple[int, ...]) -> list[bool]:
        """Ack (start, end) or (start, end, epoch) ranges. The returned list gets an item when the ack is confirmed."""
        answered: list[bool] = []
        self.broker.ack(consumer, self._with_epochs(consumer, ranges), lambda: answered.append(True))
        self.turn()
        return answered

    def nack(
        self, consumer: AttachedConsumer, *ranges: tuple[int, ...], delay: float | None = 0.0, **failure: Any
    ) -> list[bool]:
        """Nack ranges like ``ack``; the rows are retried after ``delay`` seconds (None: by the retry policy)."""
        answered: list[bool] = []
        outcome = NackOutcome(delay, **failure)
        self.broker.nack(consumer, self._with_epochs(consumer, ranges), lambda: answered.append(True), outcome)
        self.turn()
        return answered

    def _with_epochs(self, consumer: AttachedConsumer, ranges: Sequence[tuple[int, ...]]) -> list[tuple[int, int, int]]:
        return [(r[0], r[1], r[2] if len(r) > 2 else self.broker.turn.epoch) for r in ranges]

    def read(self, subject: str, sequence: int, count: int = 1000, size: int = 1 << 20, wait: float = 0) -> ReadAnswer:
        answer = ReadAnswer()
        self.broker.read(self.partition(subject), sequence, count, size, wait, answer.answer)
        return answer

    def contact(self, consumer: AttachedConsumer) -> None:
        """A request of the consumer has come."""
        consumer.last_contact = self.clock.monotonic()

    def forget_idle(self) -> int:
        return sum(self.membership.forget_idle_steps())

    # --- looking --------------------------------------------------------------------------------

    def partition(self, subject: str) -> Partition:
        return self.broker.partition_of(subject)

    def group(self, subject: str, name: str) -> Group:
        return self.membership.group(subject, name)

    def stored(self, subject: str) -> list[Row]:
        """Every visible message."""
        partition = self.partition(subject)
        batch = partition.read(self.broker.message_log, partition.start, partition.visible, 1 << 30, 1 << 30)
        return rows_of(batch.parts)

    def bodies(self, subject: str) -> list[bytes]:
        return [row.body for row in self.stored(subject)]

    def checkpoint(self) -> None:
        work = self.broker.snapshots.work
        if work is not None and work.sync is not None:
            # In a server a thread does this.
            self.checkpoint_step()
        self.broker.snapshots.make()

    def checkpoint_step(self) -> None:
        """Take one step of a slow checkpoint: begin it, copy one shard, or write it.

        No time passes during its sync, because the broker would refuse sends.
        """
        work = self.broker.snapshots.work
        if work is None:
            self.broker.snapshots.begin()
        elif work.sync is not None or not work.copy_some(1):
            work.run()
            self.broker.snapshots.end(work)

    # --- ends -----------------------------------------------------------------------------------

    def restart(self, **settings: Any) -> Node:
        """Stop cleanly and start again."""
        self.broker.stop()
        return self._again(self.disk, settings)

    def killed(self, **settings: Any) -> Node:
        """Kill the process and start again; the page cache survives."""
        return self._again(self.disk.copy(), settings)

    def power_lost(self, keep: Keep = "none", rng: random.Random | None = None, **settings: Any) -> Node:
        """Lose power and start again; ``keep`` says which unsynced changes survive."""
        return self._again(self.disk.after_crash(rng, keep), settings)

    def fallen_back(self) -> Node:
        """Kill the process and damage the newest of several checkpoints; start again."""
        disk = self.disk.copy()
        names = [name for name in disk.list(CHECKPOINTS) if name.startswith("manifest-")]
        if len(names) > 1:
            disk.flip_bit(f"{CHECKPOINTS}/{max(names)}", 20, 2)
        return self._again(disk, {})

    def _again(self, disk: Disk, settings: dict[str, Any]) -> Node:
        if not settings:
            return Node(disk, self.clock, self.config)
        import msgspec

        return Node(disk, self.clock, msgspec.structs.replace(self.config, **settings))
