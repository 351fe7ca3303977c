"""Stages: rows of a batch that are invisible until the batch is committed (R23).

A *stage* has the rows that one attempt of a task wrote for one partition. It is a hidden partition in the message log,
with one producer. The meta server decides once per batch which stages are published (``StagePublisher``). Publishing is
idempotent: the broker treats an unknown stage as published. So it has to remember expired stages for a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from plait.broker.catalog import Catalog
from plait.broker.partitions.partition import Partition
from plait.broker.schedule.due_delivery import check_due
from plait.broker.turn import Turn, write_messages
from plait.errors import DamageError, Expired, FrameError, InvalidArgument, LimitExceeded, PlaitError
from plait.frame.columns import Column
from plait.frame.header import FLAG_UNSEQUENCED
from plait.frame.view import FrameView
from plait.storage.catalog import STAGE, PartitionRow, Stage
from plait.storage.logs.consume_log import Record, stored_frame

PUBLISHING: Final = "publishing"
MOVED: Final = "moved"
EXPIRED: Final = "expired"

#: Called once: with None when the request is done and durable, otherwise with the error.
Reply = Callable[[PlaitError | None], None]


class Stages:
    """All stages of a broker, by their producers."""

    def __init__(self, turn: Turn, catalog: Catalog) -> None:
        self._turn = turn
        self._catalog = catalog
        self._all: dict[int, Partition] = {}
        self._queries: dict[str, dict[int, Partition]] = {}
        #: Stages to publish; the first one is being published.
        self.queue: deque[Partition] = deque()
        catalog.kinds[STAGE] = self

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, producer: int) -> bool:
        return producer in self._all

    def of(self, name: str) -> list[Partition]:
        """The stages to delete with their target partition: none. The commit of the batch finds the target deleted."""
        return []

    def any_for(self, name: str) -> bool:
        """Whether a stage has rows for the partition ``name`` that may be published or copied."""
        return any(each.row.name == name and stage_of(each).state != EXPIRED for each in self._all.values())

    def add(self, partition: Partition) -> None:
        stage = stage_of(partition)
        self._all[stage.producer] = partition
        self._queries.setdefault(stage.query, {})[stage.producer] = partition

    def remove(self, partition: Partition) -> None:
        stage = stage_of(partition)
        if self._all.get(stage.producer) is partition:
            del self._all[stage.producer]
            of_query = self._queries[stage.query]
            del of_query[stage.producer]
            if not of_query:
                del self._queries[stage.query]

    def open(self, name: str, stage: Stage) -> Partition:
        """The stage of this producer for the partition ``name``; created if it does not exist."""
        known = self._all.get(stage.producer)
        if known is not None:
            if known.row.name != name or known.row.stage != stage:
                raise InvalidArgument(
                    f"producer {stage.producer:016x} has another stage, or this one is closed; use a new producer"
                )
            return known
        target = self._catalog.partition_of(name)
        limit = self._turn.limits.stages
        if len(self._all) >= limit:
            raise LimitExceeded(
                f"stage limit reached ({limit} per broker, limit `stages`); commit or drop some, or raise it",
                limit="stages",
                value=limit,
            )
        self._turn.refuse_when_full()
        number, now = self._catalog.next_partition, self._turn.clock.now()
        return self._catalog.create(PartitionRow(number, target.row.subject, name, now, kind=STAGE, stage=stage))

    # --- rows --------------------------------------------------------------------------------------

    def check(self, partition: Partition, frame: FrameView) -> None:
        """Refuse a received frame that does not belong to this stage."""
        stage = stage_of(partition)
        if stage.state:
            raise InvalidArgument(
                f"the stage of producer {stage.producer:016x} takes no more rows: its state is {stage.state}"
            )
        if not frame.flags & FLAG_UNSEQUENCED or frame.producer != stage.producer:
            raise FrameError("a stage takes unsequenced frames of its own producer only")
        if frame.has(Column.DELIVER_AT) != stage.delayed:
            raise FrameError("frames with due times and frames without need separate stages")
        if stage.delayed:
            check_due(int(frame.values(Column.DELIVER_AT).max()), self._turn.clock.now())
        if frame.first > partition.next:
            # A resend of stored rows does not count.
            self._catalog.spend_rate(partition, frame)

    def complete(self, producers: Iterable[tuple[int, int]], reply: Reply) -> None:
        """Check that stages, given as (producer, rows), are complete; ``reply`` is called when they are durable."""
        for producer, count in producers:
            self.checked(producer, count)
        self._turn.answer_when_durable(lambda: reply(None))

    def read(self, producer: int, start: int, size: int) -> tuple[str, list[bytes], int]:
        """A stage's subject, about ``size`` bytes of its frames from row ``start`` on, and the row after them."""
        partition = self._all.get(producer)
        frames: list[bytes] = []
        if partition is None:
            raise Expired(f"the stage of producer {producer:016x} does not exist here, or no longer")
        write_messages(self._turn)
        for frame, record in self.frames(partition, start):
            frames.append(bytes(frame.buffer))
            start = record.end
            size -= frame.size
            if size <= 0:
                break
        return partition.row.subject, frames, start

    def checked(self, producer: int, count: int) -> Partition:
        """The stage of a producer; raises if it expired or does not have exactly ``count`` rows."""
        partition = self._all.get(producer)
        if partition is None or stage_of(partition).state == EXPIRED:
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

    def frames(self, partition: Partition, start: int, *, trusted: bool = False) -> Iterator[tuple[FrameView, Record]]:
        """The frames of a stage from row ``start`` on, verified unless ``trusted``, and the record of each.

        Raises ``DamageError`` if a row cannot be read, also if the frames of the last rows are missing.
        """
        log, records = self._turn.message_log, partition.consume_log
        for index in range(records.find(start), len(records)):
            record = records.record(index)
            try:
                if record.base != start:
                    raise FrameError("its frame is not in the log")
                frame = stored_frame(log, partition.id, record, verify=not trusted)
            except (FrameError, DamageError) as error:
                raise _unreadable(partition, start, str(error)) from error
            start = record.end
            yield frame, record
        if start < partition.next:
            raise _unreadable(partition, start, "its frame is not in the log")

    # --- ends --------------------------------------------------------------------------------------

    def drop(self, producers: Iterable[int]) -> int:
        """Delete stages that are not to be published. Returns their number. Takes effect with the next commit."""
        self._turn.commit()
        chosen = [self._all[producer] for producer in dict.fromkeys(producers) if producer in self._all]
        return self._delete([partition for partition in chosen if stage_of(partition).state != PUBLISHING])

    def forget(self, query: str, batch: int) -> int:
        """Delete the unpublished stages of the query's batches up to this one; these batches are committed."""
        self._turn.commit()
        chosen = self._queries.get(query, {}).values()
        return self._delete([p for p in chosen if stage_of(p).batch <= batch and stage_of(p).state != PUBLISHING])

    def expire(self) -> None:
        """Expire stages that no driver has published in time, and delete the oldest of too many expired stages."""
        limits = self._turn.limits
        late = self._turn.clock.now() - int(limits.stage_seconds * 1_000_000)
        queued = set(self.queue)
        self.change(
            # This includes stages whose publishing stopped at damage: they would retain log segments for nothing.
            [p for p in self._all.values() if stage_of(p).state != EXPIRED and p not in queued and _silent(p, late)],
            EXPIRED,
        )
        expired = [partition for partition in self._all.values() if stage_of(partition).state == EXPIRED]
        if (count := len(expired) - limits.stages_expired) > 0:
            self._delete(sorted(expired, key=lambda partition: partition.row.id)[:count])

    def change(self, partitions: list[Partition], state: str) -> None:
        try:
            self._catalog.change(
                [
                    msgspec.structs.replace(each.row, stage=msgspec.structs.replace(stage_of(each), state=state))
                    for each in partitions
                ]
            )
        finally:
            _release_expired(partitions)

    def _delete(self, partitions: list[Partition]) -> int:
        self._catalog.delete(partitions)
        return len(partitions)

    # --- recovery -------------------------------------------------------------------------------

    def replay(self, target: Partition, offset: int, frame: FrameView) -> None:
        """Replay a frame of the message log that may be the copy of a stage's frame."""
        partition = self._all.get(frame.producer)
        if partition is None or stage_of(partition).state != PUBLISHING or frame.has(Column.SCHEDULE):
            return
        if target.row.name == partition.row.name and offset >= partition.position.message:
            partition.start = max(partition.start, frame.first + frame.count - 1)
            self._turn.touch(partition)

    def recovered(self) -> None:
        """Finish recovery after both logs were replayed: queue the stages whose publishing had begun."""
        self.queue.extend(p for p in self._all.values() if stage_of(p).state == PUBLISHING)
        _release_expired(self._all.values())


def _unreadable(partition: Partition, row: int, why: str) -> DamageError:
    return DamageError(
        f"row {row} of the stage of producer {stage_of(partition).producer:016x} cannot be read "
        f"({why}): the batch cannot be published; run 'plait doctor'"
    )


def stage_of(partition: Partition) -> Stage:
    stage = partition.row.stage
    assert stage is not None
    return stage


def _release_expired(partitions: Iterable[Partition]) -> None:
    """The rows of expired stages are not needed."""
    for partition in partitions:
        if stage_of(partition).state == EXPIRED:
            partition.start = partition.next


def _silent(partition: Partition, since: int) -> bool:
    """Whether no row was stored since then. For a stage that was created later, the consume log is not opened."""
    if partition.row.created >= since:
        return False
    records = partition.consume_log
    return not len(records) or records.record(len(records) - 1).time < since
