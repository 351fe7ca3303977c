"""Stages: rows of a batch that are invisible until the batch is committed (R23).

A *stage* has the rows that one attempt of a task wrote for one partition. It is a hidden partition in the message log,
with one producer. To publish a stage, the broker appends its frames again unchanged, stamped as rows of the target
partition. A catalog row before the first copy records that publishing has begun, and one after the last copy deletes
the stage. All of this is in the message log in order, so after a crash the copies that follow the first catalog row
show the progress, and the broker continues from there. A stage whose publishing has begun is published completely
before a seal takes LPs from its partition.

The meta server decides once per batch which stages are published. Publishing is idempotent: an unknown stage counts as
published. So the broker remembers expired stages for a while. A stage that was refused because its keys have moved
stays refused, because the driver writes its rows to other partitions.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from plait.broker.commit import Commit
from plait.broker.partitions.partition import Partition
from plait.broker.recovery.copied_ranges import CopiedRanges
from plait.broker.recovery.segment_headers import CATALOG_FRAME_ROWS
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
#: Bytes that one turn publishes: the loop serves other requests too.
PUBLISH_SIZE_MAX: Final = 8 * MIB
#: Turns that may wait for the disk: it syncs one while the next is copied. More would only delay other requests in the
#: disk's queue.
TURNS_AHEAD: Final = 2
#: While a seal waits for a partition, publishing of further stages to it is refused for this long. The meta server
#: repeats the seal sooner than that.
CLOSING_SECONDS: Final = 10.0
#: Time before publishing is tried again after the disk was full.
RETRY_SECONDS: Final = 1.0

#: Called once: with None when the stages are durably published, otherwise with the error.
Reply = Callable[[PlaitError | None], None]


class _Waiter:
    """A request that waits until its stages are published."""

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
        #: Stages to publish; the first one is being published.
        self._queue: deque[Partition] = deque()
        self._waiters: list[_Waiter] = []
        #: Ranges of the frames that were copied since the queue was last empty.
        self._copied = CopiedRanges()
        #: The end of the message log after each turn that is not durable yet. No request waits for their sync, so
        #: its age does not count for flow control.
        self.unsynced: deque[int] = deque()
        #: The next commit continues publishing.
        self.ready = False
        #: Monotonic time until which publishing pauses after an error.
        self._held_until = 0.0
        #: Name of a partition that a seal waits for → monotonic time until which no further stage is published to it.
        self._closing: dict[str, float] = {}

    # --- which there are ------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, producer: int) -> bool:
        return producer in self._all

    def any_for(self, name: str) -> bool:
        """Whether a stage has rows for the partition ``name`` that may be published or copied."""
        return any(each.row.name == name and _stage(each).state != EXPIRED for each in self._all.values())

    def add(self, partition: Partition) -> None:
        """Register a stage."""
        stage = _stage(partition)
        self._all[stage.producer] = partition
        self._queries.setdefault(stage.query, {})[stage.producer] = partition

    def remove(self, partition: Partition) -> None:
        """Unregister a stage."""
        stage = _stage(partition)
        if self._all.get(stage.producer) is partition:
            del self._all[stage.producer]
            of_query = self._queries[stage.query]
            del of_query[stage.producer]
            if not of_query:
                del self._queries[stage.query]

    def open(self, name: str, stage: Stage) -> Partition:
        """The stage of this producer for the partition ``name``; created if it does not exist."""
        broker = self._broker
        known = self._all.get(stage.producer)
        if known is not None:
            if known.row.name != name or known.row.stage != stage:
                raise InvalidArgument(
                    f"producer {stage.producer:016x} has another stage, or this one is closed; use a new producer"
                )
            return known
        target = broker.partition_of(name)
        limit = broker.limits.stages
        if len(self._all) >= limit:
            raise LimitExceeded(
                f"stage limit reached ({limit} per broker, limit `stages`); commit or drop some, or raise it",
                limit="stages",
                value=limit,
            )
        broker.turn.refuse_when_full()
        row = PartitionRow(broker.next_partition, target.row.subject, name, broker.clock.now(), kind=STAGE, stage=stage)
        return create_partition(broker, row)

    # --- rows come ------------------------------------------------------------------------------

    def check(self, partition: Partition, frame: FrameView) -> None:
        """Refuse a received frame that does not belong to this stage."""
        stage = _stage(partition)
        if stage.state:
            raise InvalidArgument(
                f"the stage of producer {stage.producer:016x} takes no more rows: its state is {stage.state}"
            )
        if not frame.flags & FLAG_UNSEQUENCED or frame.producer != stage.producer:
            raise FrameError("a stage takes unsequenced frames of its own producer only")
        if frame.has(Column.DELIVER_AT) != stage.delayed:
            raise FrameError("frames with due times and frames without need separate stages")
        if stage.delayed:
            self._broker.schedules.check_time(int(frame.values(Column.DELIVER_AT).max()))

    def complete(self, producers: Iterable[tuple[int, int]], reply: Reply) -> None:
        """Check that stages, given as (producer, rows), are complete; ``reply`` is called when they are durable."""
        for producer, count in producers:
            self._checked(producer, count)
        self._broker.turn.answer_when_durable(lambda: reply(None))

    def read(self, producer: int, start: int, size: int) -> tuple[str, list[bytes], int]:
        """A stage's subject, about ``size`` bytes of its frames from row ``start`` on, and the row after them."""
        partition = self._all.get(producer)
        frames: list[bytes] = []
        if partition is None:
            raise Expired(f"the stage of producer {producer:016x} does not exist here, or no longer")
        self._write()
        for frame, record in self._frames(partition, start):
            frames.append(bytes(frame.buffer))
            start = record.base + record.count
            size -= frame.size
            if size <= 0:
                break
        return partition.row.subject, frames, start

    def _checked(self, producer: int, count: int) -> Partition:
        """The stage of a producer; raises if it expired or does not have exactly ``count`` rows."""
        partition = self._all.get(producer)
        if partition is None or _stage(partition).state == EXPIRED:
            raise Expired(
                f"the stage of producer {producer:016x} has expired or was dropped, and its rows are lost: "
                "start the query with a new checkpoint"
            )
        if partition.next != count:
            raise DamageError(
                f"the stage of producer {producer:016x} has {partition.next} rows, not {count}: the others were lost "
                "before they were durable; write the batch again"
            )
        return partition

    # --- rows are published ---------------------------------------------------------------------

    def publish(self, producers: Iterable[tuple[int, int]], reply: Reply) -> None:
        """Publish stages, given as (producer, rows); ``reply`` is called when they are durably published.

        Unknown stages were published before. Raises and publishes nothing if a stage has expired, or if a seal waits
        for its partition (``FlowControl``). Nothing is published either if ``reply`` gets a ``StaleRoute``: the target
        partition no longer takes the keys of the stages that it names, and the driver writes their rows elsewhere.
        """
        broker = self._broker
        broker.turn.refuse_when_full()
        broker.turn.commit()
        wanted = {producer: self._checked(producer, rows) for producer, rows in producers if producer in self._all}
        begun = [partition for partition in wanted.values() if _stage(partition).state != PUBLISHING]
        self._check_closing(begun)
        if moved := [partition for partition in begun if _stage(partition).state or not self._takes(partition)]:
            self._refuse(moved, reply)
            return
        self._change(begun, PUBLISHING)
        if not wanted:
            broker.turn.answer_when_durable(lambda: reply(None))
            return
        # In the order of the request. A stage whose publishing stopped at damage is tried again.
        queued = set(self._queue)
        self._queue.extend(partition for partition in wanted.values() if partition not in queued)
        self._waiters.append(_Waiter(set(wanted), reply))
        self.ready = True
        broker.turn.answer_after_commit(None)

    def drop(self, producers: Iterable[int]) -> int:
        """Delete stages that are not to be published. Returns how many there were. Counts once committed."""
        self._broker.turn.commit()
        chosen = [self._all[producer] for producer in dict.fromkeys(producers) if producer in self._all]
        return self._delete([partition for partition in chosen if _stage(partition).state != PUBLISHING])

    def forget(self, query: str, batch: int) -> int:
        """Delete the other stages of all batches of the query up to this one, which are published."""
        self._broker.turn.commit()
        chosen = self._queries.get(query, {}).values()
        return self._delete([p for p in chosen if _stage(p).batch <= batch and _stage(p).state != PUBLISHING])

    def finish(self, target: Partition) -> None:
        """Commit, and check that no stage is being published to a partition; raises ``FlowControl`` while one is.

        Each call publishes one turn's worth, because the loop serves other requests too. Meanwhile no further stage is
        published to the partition.
        """
        broker, name = self._broker, target.row.name
        if self._busy_with(name) and broker.clock.monotonic() >= self._held_until:
            self.ready = True
            broker.turn.answer_after_commit(None)
        broker.turn.commit()
        if broker.turn.failed is not None:
            raise broker.turn.failed
        if self._busy_with(name):
            self._closing[name] = broker.clock.monotonic() + CLOSING_SECONDS
            full = ", and the disk is full" if broker.clock.monotonic() < self._held_until else ""
            raise FlowControl(f"stages are being published to {name!r}{full}; try again")
        self._closing.pop(name, None)

    def _busy_with(self, name: str) -> bool:
        return any(partition.row.name == name for partition in self._queue)

    def look(self) -> bool:
        """Set and return ``ready``: whether ``run`` has work to do."""
        waiting = len(self.unsynced) >= TURNS_AHEAD
        self.ready = bool(self._queue) and not waiting and self._broker.clock.monotonic() >= self._held_until
        return self.ready

    def synced(self) -> None:
        """More of the message log is durable: continue if publishing waited for that."""
        durable = self._broker.message_log.durable
        while self.unsynced and self.unsynced[0] <= durable:
            self.unsynced.popleft()
        if self.look():
            self._broker.turn.answer_after_commit(None)

    def run(self, now: int, commit: Commit) -> None:
        """Publish one turn's worth. Stages that find no space on the disk stay queued and are tried again."""
        self.ready = False
        broker = self._broker
        try:
            broker.turn.refuse_when_full()
            self._write()
            room = PUBLISH_SIZE_MAX
            while self._queue and room > 0:
                room -= self._publish(self._queue[0], now, commit, room)
            self._forget()
        except OSError as error:
            self._held_until = broker.clock.monotonic() + RETRY_SECONDS
            broker.turn.disk_error(error)
        except (DiskFull, ReadOnly, FlowControl):
            self._held_until = broker.clock.monotonic() + RETRY_SECONDS
        except StorageFailed:
            # ``broker.turn.failed`` is set, and the server stops.
            return
        else:
            if self._queue:
                self.unsynced.append(broker.message_log.end)
                if self.look():
                    broker.turn.answer_after_commit(None)

    def _publish(self, partition: Partition, now: int, commit: Commit, room: int) -> int:
        """Append up to ``room`` bytes of a stage's frames to their partition. Returns their size."""
        broker = self._broker
        size = 0
        stage = _stage(partition)
        target = broker.subjects.get(partition.row.name)
        if target is not None and stage.delayed:
            target = broker.schedules.partition_of(partition.row.name)
        if target is not None:
            try:
                for frame, record in self._frames(partition, partition.start):
                    broker.turn.appender.copy(target, frame, broker.turn.epoch, now, commit)
                    broker.turn.touch(target)
                    partition.start = record.base + record.count
                    self._copied.add(record.offset, record.offset + record.size)
                    broker.turn.touch(partition)
                    size += frame.size
                    if size >= room:
                        break
            except DamageError as error:
                # The next request to publish the stage tries again; without one the stage expires.
                log.error("publishing a stage to %s stopped: %s", partition.row.name, error)
                self._queue.popleft()
                self._answer(stage.producer, error)
                return size
        # If the subject was deleted meanwhile, the rows of the stage are deleted too.
        if target is None or partition.start >= partition.next:
            broker.segment_headers.define([msgspec.structs.replace(partition.row, deleted=True)])
            self._queue.popleft()
            drop_partition(broker, partition)
            self._answer(stage.producer, None)
        return size

    def _forget(self) -> None:
        """Release the memory of the frames that this turn copied, so that the next copies can use it."""
        self._write()
        for start, end in self._copied.take():
            self._broker.message_log.forget(start, end)
        if not self._queue:
            self._copied.clear()

    def _frames(self, partition: Partition, start: int, *, trusted: bool = False) -> Iterator[tuple[FrameView, Record]]:
        """The frames of a stage from row ``start`` on, verified unless ``trusted``, and the record of each.

        Raises ``DamageError`` if a row cannot be read, also if the frames of the last rows are missing.
        """
        log, records = self._broker.message_log, partition.consume_log
        for index in range(records.find(start), len(records)):
            record = records.record(index)
            try:
                frame = FrameView(log.view(record.offset, record.size))
                if not trusted:
                    frame.verify()
                if (frame.partition, frame.base, frame.count) != (partition.id, start, record.count):
                    raise FrameError("the log has another frame at this offset")
            except (FrameError, DamageError) as error:
                raise _unreadable(partition, start, str(error)) from error
            start = record.base + record.count
            yield frame, record
        if start < partition.next:
            raise _unreadable(partition, start, "its frame is not in the log")

    def _answer(self, producer: int, error: PlaitError | None) -> None:
        """Answer the requests that wait for a stage: it is published, or ``error`` prevents that."""
        for waiter in list(self._waiters):
            if producer not in waiter.producers:
                continue
            waiter.producers.discard(producer)
            if error is not None or not waiter.producers:
                self._waiters.remove(waiter)
                self._broker.turn.answer_when_durable(lambda reply=waiter.reply: reply(error))  # type: ignore[misc]

    def _check_closing(self, partitions: list[Partition]) -> None:
        """Raise if a seal waits for the target partition of one of these stages."""
        now = self._broker.clock.monotonic()
        self._closing = {name: until for name, until in self._closing.items() if now < until}
        for partition in partitions:
            if partition.row.name in self._closing:
                raise FlowControl(f"partition {partition.row.name!r} is being sealed; try again")

    def _refuse(self, moved: list[Partition], reply: Reply) -> None:
        """Refuse stages whose keys have moved, permanently: also after a crash, and if the keys return.

        The driver that gets this reply writes the rows again elsewhere, so a later request must not publish them here.
        """
        self._change([partition for partition in moved if not _stage(partition).state], MOVED)
        producers = [_stage(partition).producer for partition in moved]
        error = StaleRoute(
            f"partition {moved[0].row.name!r} no longer takes these keys; write the rows to the route's partitions",
            producer=producers[0],
            producers=producers,
        )
        self._broker.turn.answer_when_durable(lambda: reply(error))

    def _takes(self, partition: Partition) -> bool:
        target = self._broker.subjects.get(partition.row.name)
        return target is not None and (
            target.accepts is None
            # This reads only key hashes; ``_publish`` verifies the frames.
            or all(target.takes(frame) for frame, _ in self._frames(partition, 0, trusted=True))
        )

    def _write(self) -> None:
        """Write the log, so that the rows of this turn can be read."""
        broker = self._broker
        try:
            broker.message_log.write()
        except OSError as error:
            broker.turn.storage_failed(error)
            assert broker.turn.failed is not None
            raise broker.turn.failed from error

    # --- ends -----------------------------------------------------------------------------------

    def expire(self) -> None:
        """Expire stages that no driver has published in time, and delete the oldest of too many expired stages."""
        broker = self._broker
        late = broker.clock.now() - int(broker.limits.stage_seconds * 1_000_000)
        queued = set(self._queue)
        self._change(
            # This includes stages whose publishing stopped at damage: they would retain log segments for nothing.
            [p for p in self._all.values() if _stage(p).state != EXPIRED and p not in queued and _silent(p, late)],
            EXPIRED,
        )
        expired = [partition for partition in self._all.values() if _stage(partition).state == EXPIRED]
        if (count := len(expired) - broker.limits.stages_expired) > 0:
            self._delete(sorted(expired, key=lambda partition: partition.row.id)[:count])

    def _change(self, partitions: list[Partition], state: str) -> None:
        """Record a new state of stages in the catalog."""
        broker = self._broker
        for some in _pages(partitions):
            rows = [
                msgspec.structs.replace(each.row, stage=msgspec.structs.replace(_stage(each), state=state))
                for each in some
            ]
            broker.segment_headers.define(rows)
            for partition, row in zip(some, rows, strict=True):
                partition.redefine(row)
                if state == EXPIRED:
                    partition.start = partition.next
                broker.turn.touch(partition)

    def _delete(self, partitions: list[Partition]) -> int:
        broker = self._broker
        for some in _pages(partitions):
            rows = [msgspec.structs.replace(each.row, deleted=True) for each in some]
            broker.segment_headers.define(rows)
            for partition in some:
                drop_partition(broker, partition)
        return len(partitions)

    # --- recovery -------------------------------------------------------------------------------

    def replay(self, target: Partition, offset: int, frame: FrameView) -> None:
        """Replay a frame of the message log that may be the copy of a stage's frame."""
        partition = self._all.get(frame.producer)
        if partition is None or _stage(partition).state != PUBLISHING or frame.has(Column.SCHEDULE):
            return
        if target.row.name == partition.row.name and offset >= partition.position.message:
            partition.start = max(partition.start, frame.first + frame.count - 1)
            self._broker.turn.touch(partition)

    def recovered(self) -> None:
        """Finish recovery after both logs were replayed: queue the stages whose publishing had begun."""
        self._queue = deque(p for p in self._all.values() if _stage(p).state == PUBLISHING)
        for partition in self._all.values():
            if _stage(partition).state == EXPIRED:
                partition.start = partition.next


def _unreadable(partition: Partition, row: int, why: str) -> DamageError:
    return DamageError(
        f"row {row} of the stage of producer {_stage(partition).producer:016x} cannot be read "
        f"({why}): the batch cannot be published; run 'plait doctor'"
    )


def _stage(partition: Partition) -> Stage:
    stage = partition.row.stage
    assert stage is not None
    return stage


def _silent(partition: Partition, since: int) -> bool:
    """Whether no row was stored since then. For a stage that was created later, the consume log is not opened."""
    if partition.row.created >= since:
        return False
    records = partition.consume_log
    return not len(records) or records.record(len(records) - 1).time < since


def _pages(partitions: list[Partition]) -> Iterator[list[Partition]]:
    """Split into pages of one catalog frame each. If the disk fills up, the pages written so far are in effect."""
    return (partitions[start : start + CATALOG_FRAME_ROWS] for start in range(0, len(partitions), CATALOG_FRAME_ROWS))
