"""Stages: what the tasks of a batch wrote, which nobody sees before the batch is committed (R23).

A *stage* holds what one attempt of a task wrote for one partition: a hidden partition of its own in the message log,
with one producer. To publish it, its frames are appended once more as they are, stamped as rows of the partition they
are for. The catalog says before the first of them that this has begun, and after the last that the stage is gone. All
of it is in line in the message log, so that after a crash the frames that follow the first of the two rows say how far
it has come; from there it goes on by itself. A stage that has begun is published whole, before its partition takes no
more rows of some keys.

Which stages are published is decided elsewhere, once for all of a batch: asking again changes nothing, and of a stage
that is not known any more nothing is left to be done. That is why one that expired stays known for a while, and why
one that was refused, as its keys have moved, is refused for good: its rows are being copied.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from plait.broker.appender import Appended
from plait.broker.partitions.partition import Partition
from plait.broker.recovery.copied_ranges import CopiedRanges
from plait.broker.recovery.segment_headers import HEAD_ROWS
from plait.broker.subjects import create_partition, drop_partition
from plait.errors import (
    DamageError,
    DiskFull,
    Expired,
    FlowControl,
    FrameError,
    InvalidArgument,
    LimitExceeded,
    PlaitError,
    ReadOnly,
    StaleRoute,
    StorageFailed,
)
from plait.frame.columns import Column
from plait.frame.header import FLAG_UNSEQUENCED
from plait.frame.view import FrameView
from plait.limits import MIB
from plait.storage.catalog import STAGE, PartitionRow, Stage
from plait.storage.logs.consume_log import Record

if TYPE_CHECKING:
    from plait.broker.broker import Broker

log = logging.getLogger("plait.broker")

PUBLISHING: Final = "publishing"
MOVED: Final = "moved"
EXPIRED: Final = "expired"
#: Bytes that are published in one turn: the loop has others to serve.
PUBLISH_SIZE_MAX: Final = 8 * MIB
#: Turns that may wait for the disk: it works on one while the next is copied. More of them would only make its queue
#: longer, and others stand in that.
TURNS_AHEAD: Final = 2
#: A seal that waits for what is being published keeps more from beginning for so long: it is asked for again sooner.
CLOSING_SECONDS: Final = 10.0
#: Time before what the disk had no room for is tried again.
RETRY_SECONDS: Final = 1.0

#: Called once: the stages are published, durably, or why they are not.
Reply = Callable[[PlaitError | None], None]


class _Waiter:
    """Somebody waits for stages to be published."""

    __slots__ = ("producers", "reply")

    def __init__(self, producers: set[int], reply: Reply) -> None:
        self.producers = producers
        self.reply = reply


class Stages:
    """All stages of a broker, by their producers."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._all: dict[int, Partition] = {}
        self._queries: dict[str, dict[int, Partition]] = {}
        #: Those that are being published, the first at present.
        self._queue: deque[Partition] = deque()
        self._waiters: list[_Waiter] = []
        #: Where frames stand that were copied since there was nothing to do.
        self._copied = CopiedRanges()
        #: Where the message log ended after each turn that is not known to be durable.
        self._turns: deque[int] = deque()
        #: The next commit goes on with it.
        self.ready = False
        #: On the monotonic clock: until then it does not.
        self._held_until = 0.0
        #: Partitions that a seal waits for → until when (monotonic) nothing more begins to be published to them.
        self._closing: dict[str, float] = {}

    # --- which there are ------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, producer: int) -> bool:
        return producer in self._all

    def any_for(self, name: str) -> bool:
        """Some hold rows for the partition ``name`` that may be published or copied."""
        return any(each.row.name == name and _stage(each).state != EXPIRED for each in self._all.values())

    def add(self, partition: Partition) -> None:
        """A stage is known."""
        stage = _stage(partition)
        self._all[stage.producer] = partition
        self._queries.setdefault(stage.query, {})[stage.producer] = partition

    def remove(self, partition: Partition) -> None:
        """A stage is gone."""
        stage = _stage(partition)
        if self._all.get(stage.producer) is partition:
            del self._all[stage.producer]
            of_query = self._queries[stage.query]
            del of_query[stage.producer]
            if not of_query:
                del self._queries[stage.query]

    def open(self, name: str, stage: Stage) -> Partition:
        """The stage of this producer for the partition ``name``; made now, if it is not there."""
        broker = self._broker
        known = self._all.get(stage.producer)
        if known is not None:
            if known.row.name != name or known.row.stage != stage:
                raise InvalidArgument(f"producer {stage.producer:016x} has another stage, or has closed this one")
            return known
        target = broker.partition_of(name)
        limit = broker.limits.stages
        if len(self._all) >= limit:
            raise LimitExceeded(
                f"this broker has its {limit} stages; commit or drop some, or raise the limit",
                limit="stages",
                value=limit,
            )
        broker.refuse_when_full()
        row = PartitionRow(broker.next_partition, target.row.subject, name, broker.clock.now(), kind=STAGE, stage=stage)
        return create_partition(broker, row)

    # --- rows come ------------------------------------------------------------------------------

    def check(self, partition: Partition, frame: FrameView) -> None:
        """A frame that was sent is one of this stage."""
        stage = _stage(partition)
        if stage.state:
            raise InvalidArgument(
                f"the stage of producer {stage.producer:016x} takes no more rows: it is {stage.state}"
            )
        if not frame.flags & FLAG_UNSEQUENCED or frame.producer != stage.producer:
            raise FrameError("a stage takes unsequenced frames of its own producer only")
        if frame.has(Column.DELIVER_AT) != stage.delayed:
            raise FrameError("frames with and without delivery times have stages of their own")
        if stage.delayed:
            self._broker.schedules.check_time(int(frame.values(Column.DELIVER_AT).max()))

    def complete(self, producers: Iterable[tuple[int, int]], reply: Reply) -> None:
        """(producer, rows) of stages that are whole; ``reply`` is called when they are so on the disk."""
        for producer, count in producers:
            self._checked(producer, count)
        self._broker.answer_when_durable(lambda: reply(None))

    def read(self, producer: int, start: int, size: int) -> tuple[str, list[bytes], int]:
        """A stage's subject, frames from row ``start`` on, about ``size`` bytes, and where the next one begins."""
        partition = self._all.get(producer)
        frames: list[bytes] = []
        if partition is None:
            raise Expired(f"there is no stage of producer {producer:016x} here (any more)")
        self._write()
        for frame, record in self._frames(partition, start):
            frames.append(bytes(frame.buffer))
            start = record.base + record.count
            size -= frame.size
            if size <= 0:
                break
        return partition.row.subject, frames, start

    def _checked(self, producer: int, count: int) -> Partition:
        """A stage that somebody counts on, with so many rows."""
        partition = self._all.get(producer)
        if partition is None or _stage(partition).state == EXPIRED:
            raise Expired(
                f"the stage of producer {producer:016x} has expired, or was dropped; its rows are gone: "
                "start the query with a new checkpoint"
            )
        if partition.next != count:
            raise DamageError(
                f"the stage of producer {producer:016x} has {partition.next} rows, not {count}: the others were lost "
                "before they were on the disk; write the batch again"
            )
        return partition

    # --- rows are published ---------------------------------------------------------------------

    def publish(self, producers: Iterable[tuple[int, int]], reply: Reply) -> None:
        """(producer, rows) of stages that consumers are to see; ``reply`` is called when that is so, durably.

        Those that are not known have been published before. Raises, and nothing has begun, if one of the others has
        expired, or where a seal waits for what has begun (``FlowControl``). Nor has it if ``reply`` gets a
        ``StaleRoute``: the partition of those that it names does not take their keys any more; the rows go elsewhere.
        """
        broker = self._broker
        broker.refuse_when_full()
        broker.commit()
        wanted = {producer: self._checked(producer, rows) for producer, rows in producers if producer in self._all}
        begun = [partition for partition in wanted.values() if _stage(partition).state != PUBLISHING]
        self._check_closing(begun)
        if moved := [partition for partition in begun if _stage(partition).state or not self._takes(partition)]:
            self._refuse(moved, reply)
            return
        self._change(begun, PUBLISHING)
        if not wanted:
            broker.answer_when_durable(lambda: reply(None))
            return
        # In the order in which they were named; one that was held up by damage is tried again.
        queued = set(self._queue)
        self._queue.extend(partition for partition in wanted.values() if partition not in queued)
        self._waiters.append(_Waiter(set(wanted), reply))
        self.ready = True
        broker.answer_after_commit(None)

    def drop(self, producers: Iterable[int]) -> int:
        """Stages that shall never be published; how many of them there were. Counts once committed."""
        self._broker.commit()
        chosen = [self._all[producer] for producer in dict.fromkeys(producers) if producer in self._all]
        return self._delete([partition for partition in chosen if _stage(partition).state != PUBLISHING])

    def forget(self, query: str, batch: int) -> int:
        """Every batch of the query up to this one is published: what else was written for them is dropped."""
        self._broker.commit()
        chosen = self._queries.get(query, {}).values()
        return self._delete([p for p in chosen if _stage(p).batch <= batch and _stage(p).state != PUBLISHING])

    def finish(self, target: Partition) -> None:
        """Commit, and be done with what has begun to be published to a partition; ``FlowControl``: not yet, ask again.

        It goes on a turn's worth at a time, as others are to be served as well. Meanwhile nothing more begins.
        """
        broker, name = self._broker, target.row.name
        if self._busy_with(name) and broker.clock.monotonic() >= self._held_until:
            self.ready = True
            broker.answer_after_commit(None)
        broker.commit()
        if broker.failed is not None:
            raise broker.failed
        if self._busy_with(name):
            self._closing[name] = broker.clock.monotonic() + CLOSING_SECONDS
            full = ", and the disk is full" if broker.clock.monotonic() < self._held_until else ""
            raise FlowControl(f"messages are being published to {name!r}{full}; try again")
        self._closing.pop(name, None)

    def _busy_with(self, name: str) -> bool:
        return any(partition.row.name == name for partition in self._queue)

    def look(self) -> bool:
        """Whether there is something to do for ``run``."""
        waiting = len(self._turns) >= TURNS_AHEAD
        self.ready = bool(self._queue) and not waiting and self._broker.clock.monotonic() >= self._held_until
        return self.ready

    @property
    def sync_wanted(self) -> bool:
        """What was copied is to go to the disk while the rest follows: not all at the end, when somebody waits for it.

        Nobody waits for it yet. So it is no commit that stands in line and gets old, for which sends are refused.
        """
        return bool(self._turns)

    def synced(self) -> None:
        """More of the message log is durable: what waited for that goes on."""
        durable = self._broker.message_log.durable
        while self._turns and self._turns[0] <= durable:
            self._turns.popleft()
        if self.look():
            self._broker.answer_after_commit(None)

    def run(self, now: int, appended: Appended) -> None:
        """Publish a turn's worth; what there is no room for stays, and is tried again."""
        self.ready = False
        broker = self._broker
        try:
            broker.refuse_when_full()
            self._write()
            room = PUBLISH_SIZE_MAX
            while self._queue and room > 0:
                room -= self._publish(self._queue[0], now, appended, room)
            self._forget()
        except OSError as error:
            self._held_until = broker.clock.monotonic() + RETRY_SECONDS
            broker.disk_error(error)
        except (DiskFull, ReadOnly, FlowControl):
            self._held_until = broker.clock.monotonic() + RETRY_SECONDS
        except StorageFailed:
            # The broker knows, and stops.
            return
        else:
            if self._queue:
                self._turns.append(broker.message_log.end)
                if self.look():
                    broker.answer_after_commit(None)

    def _publish(self, partition: Partition, now: int, appended: Appended, room: int) -> int:
        """Append some of a stage's frames to where they belong; their size."""
        broker = self._broker
        size = 0
        stage = _stage(partition)
        target = broker.subjects.get(partition.row.name)
        if target is not None and stage.delayed:
            target = broker.schedules.partition_of(partition.row.name)
        if target is not None:
            try:
                for frame, record in self._frames(partition, partition.start):
                    broker.appender.copy(target, frame, broker.epoch, now, appended)
                    broker.touch(target)
                    partition.start = record.base + record.count
                    self._copied.add(record.offset, record.offset + record.size)
                    broker.touch(partition)
                    size += frame.size
                    if size >= room:
                        break
            except DamageError as error:
                # It is tried again when somebody asks for it; if nobody does, it is given up in time.
                log.error("nothing more is published to %s: %s", partition.row.name, error)
                self._queue.popleft()
                self._answer(stage.producer, error)
                return size
        # Where its subject was deleted meanwhile, its rows went with it.
        if target is None or partition.start >= partition.next:
            broker.heads.define([msgspec.structs.replace(partition.row, deleted=True)])
            self._queue.popleft()
            drop_partition(broker, partition)
            self._answer(stage.producer, None)
        return size

    def _forget(self) -> None:
        """What was copied this turn need not stay in memory: the next copies come to lie where it was."""
        self._write()
        for start, end in self._copied.take():
            self._broker.message_log.forget(start, end)
        if not self._queue:
            self._copied.clear()

    def _frames(self, partition: Partition, start: int, *, trusted: bool = False) -> Iterator[tuple[FrameView, Record]]:
        """The frames of a stage from row ``start`` on, verified unless they are ``trusted``, and where each stands.

        ``DamageError`` where a row does not read back, also where it is the last that no frame was found for.
        """
        log, records = self._broker.message_log, partition.consume_log
        for index in range(records.find(start), len(records)):
            record = records.record(index)
            try:
                frame = FrameView(log.view(record.offset, record.size))
                if not trusted:
                    frame.verify()
                if (frame.partition, frame.base, frame.count) != (partition.id, start, record.count):
                    raise FrameError("another one stands there")
            except (FrameError, DamageError) as error:
                raise _unreadable(partition, start, str(error)) from error
            start = record.base + record.count
            yield frame, record
        if start < partition.next:
            raise _unreadable(partition, start, "its frame is not in the log")

    def _answer(self, producer: int, error: PlaitError | None) -> None:
        """A stage is published, or cannot be."""
        for waiter in list(self._waiters):
            if producer not in waiter.producers:
                continue
            waiter.producers.discard(producer)
            if error is not None or not waiter.producers:
                self._waiters.remove(waiter)
                self._broker.answer_when_durable(lambda reply=waiter.reply: reply(error))  # type: ignore[misc]

    def _check_closing(self, partitions: list[Partition]) -> None:
        """Raise if a seal waits for what is being published to where one of these is for."""
        now = self._broker.clock.monotonic()
        self._closing = {name: until for name, until in self._closing.items() if now < until}
        for partition in partitions:
            if partition.row.name in self._closing:
                raise FlowControl(f"partition {partition.row.name!r} is about to take fewer keys; try again")

    def _refuse(self, moved: list[Partition], reply: Reply) -> None:
        """Every one that is for elsewhere is named, and stays so, even if its keys come back and after a crash.

        Who is told so writes its rows anew: another who asks later must not have them published here as well.
        """
        self._change([partition for partition in moved if not _stage(partition).state], MOVED)
        producers = [_stage(partition).producer for partition in moved]
        error = StaleRoute(
            f"partition {moved[0].row.name!r} does not take these keys (any more); write them elsewhere",
            producer=producers[0],
            producers=producers,
        )
        self._broker.answer_when_durable(lambda: reply(error))

    def _takes(self, partition: Partition) -> bool:
        target = self._broker.subjects.get(partition.row.name)
        return target is not None and (
            target.accepts is None
            # A look at the key hashes; what is wrong with a frame is found before it is published.
            or all(target.takes(frame) for frame, _ in self._frames(partition, 0, trusted=True))
        )

    def _write(self) -> None:
        """Rows that came this turn can be read from here on."""
        broker = self._broker
        try:
            broker.message_log.write()
        except OSError as error:
            broker.storage_failed(error)
            assert broker.failed is not None
            raise broker.failed from error

    # --- ends -----------------------------------------------------------------------------------

    def expire(self) -> None:
        """Give up those that no driver has asked for in time, and forget the oldest of many that were given up."""
        broker = self._broker
        late = broker.clock.now() - int(broker.limits.stage_seconds * 1_000_000)
        queued = set(self._queue)
        self._change(
            # One that damage keeps from being published holds the log for nothing.
            [p for p in self._all.values() if _stage(p).state != EXPIRED and p not in queued and _silent(p, late)],
            EXPIRED,
        )
        expired = [partition for partition in self._all.values() if _stage(partition).state == EXPIRED]
        if (count := len(expired) - broker.limits.stages_expired) > 0:
            self._delete(sorted(expired, key=lambda partition: partition.row.id)[:count])

    def _change(self, partitions: list[Partition], state: str) -> None:
        """The catalog says what becomes of stages."""
        broker = self._broker
        for some in _pages(partitions):
            rows = [
                msgspec.structs.replace(each.row, stage=msgspec.structs.replace(_stage(each), state=state))
                for each in some
            ]
            broker.heads.define(rows)
            for partition, row in zip(some, rows, strict=True):
                partition.row = row
                if state == EXPIRED:
                    partition.start = partition.next
                broker.touch(partition)

    def _delete(self, partitions: list[Partition]) -> int:
        broker = self._broker
        for some in _pages(partitions):
            rows = [msgspec.structs.replace(each.row, deleted=True) for each in some]
            broker.heads.define(rows)
            for partition in some:
                drop_partition(broker, partition)
        return len(partitions)

    # --- recovery -------------------------------------------------------------------------------

    def replay(self, target: Partition, offset: int, frame: FrameView) -> None:
        """A frame of the message log that may be one that was published."""
        partition = self._all.get(frame.producer)
        if partition is None or _stage(partition).state != PUBLISHING or frame.has(Column.SCHEDULE):
            return
        if target.row.name == partition.row.name and offset >= partition.position.message:
            partition.start = max(partition.start, frame.first + frame.count - 1)
            self._broker.touch(partition)

    def recovered(self) -> None:
        """Both logs were replayed: what had begun goes on with the next look."""
        self._queue = deque(p for p in self._all.values() if _stage(p).state == PUBLISHING)
        for partition in self._all.values():
            if _stage(partition).state == EXPIRED:
                partition.start = partition.next


def _unreadable(partition: Partition, row: int, why: str) -> DamageError:
    return DamageError(
        f"row {row} of the stage of producer {_stage(partition).producer:016x} does not read back "
        f"({why}): the batch cannot be published; run 'plait doctor'"
    )


def _stage(partition: Partition) -> Stage:
    stage = partition.row.stage
    assert stage is not None
    return stage


def _silent(partition: Partition, since: int) -> bool:
    """Nothing was stored in it since then. Most are younger as a whole: their consume logs stay closed."""
    if partition.row.created >= since:
        return False
    records = partition.consume_log
    return not len(records) or records.record(len(records) - 1).time < since


def _pages(partitions: list[Partition]) -> Iterator[list[Partition]]:
    """As many as one frame of the catalog takes; what is done of them stands when the disk is full after that."""
    return (partitions[start : start + HEAD_ROWS] for start in range(0, len(partitions), HEAD_ROWS))
