"""Publishes stages: appends their frames again unchanged, stamped as rows of the target partition.

A catalog row before the first copy records that publishing has begun, and one after the last copy deletes the stage.
The message log has all of this in order. So after a crash the copies that follow the first catalog row show the
progress, and the broker continues from there. Once publishing of a stage has begun, a seal of its partition waits until
the stage is published completely. A stage that was refused because its keys have moved stays refused, because the
driver writes its rows to other partitions.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from plait.broker.catalog import Catalog
from plait.broker.commit import Commit
from plait.broker.partitions.partition import Partition
from plait.broker.schedule.schedules import Schedules
from plait.broker.staging.stages import MOVED, PUBLISHING, Reply, Stages, stage_of
from plait.broker.turn import Turn, write_messages
from plait.errors import DamageError, DiskFull, FlowControl, PlaitError, ReadOnly, StaleRoute, StorageFailed
from plait.limits import MIB

log = logging.getLogger("plait.broker")

#: Bytes that one turn publishes: the loop serves other requests too.
PUBLISH_SIZE_MAX: Final = 8 * MIB
#: The most publishing turns that may wait for the disk: the disk syncs one while the next is copied. More turns would
#: only delay other requests in the disk's queue.
TURNS_AHEAD: Final = 2
#: While a seal waits for a partition, publishing of further stages to it is refused for this long. The meta server
#: repeats the seal sooner than that.
CLOSING_SECONDS: Final = 10.0
#: Time before publishing is tried again after the disk was full.
RETRY_SECONDS: Final = 1.0


class PublishRequest(NamedTuple):
    """A request that waits until its stages are published."""

    producers: set[int]
    reply: Reply


class StagePublisher:
    """Publishes the stages of a broker, a limited number of bytes in each turn."""

    def __init__(self, turn: Turn, catalog: Catalog, stages: Stages, schedules: Schedules) -> None:
        self._turn = turn
        self._catalog = catalog
        self._stages = stages
        self._schedules = schedules
        self._queue = stages.queue
        self._requests: list[PublishRequest] = []
        #: Ranges of the frames that were copied since the queue was last empty.
        self._copied = CopiedRanges()
        #: The end of the message log after each publishing turn that is not durable yet. No request waits for
        #: these turns, so ``Turn.refuse_when_busy`` does not count the time that they wait for a sync.
        self.unsynced: deque[int] = deque()
        #: True if the next commit continues publishing.
        self.ready = False
        #: Monotonic time until which publishing pauses after an error.
        self._held_until = 0.0
        #: Name of a partition that a seal waits for → monotonic time until which no further stage is published to it.
        self._closing: dict[str, float] = {}

    def publish(self, producers: Iterable[tuple[int, int]], reply: Reply) -> None:
        """Publish stages, given as (producer, rows); ``reply`` is called when they are durably published.

        A stage that is not known counts as published. Raises and publishes nothing if a stage has expired, or if a seal
        waits for its partition (``FlowControl``). If the keys of some stages have moved to another partition, nothing
        is published: ``reply`` gets a ``StaleRoute`` that names these stages, and the driver writes their rows to the
        partitions of the new route.
        """
        turn = self._turn
        turn.refuse_when_full()
        turn.commit()
        stages = self._stages
        wanted = {producer: stages.checked(producer, rows) for producer, rows in producers if producer in stages}
        begun = [partition for partition in wanted.values() if stage_of(partition).state != PUBLISHING]
        self._check_closing(begun)
        if moved := [partition for partition in begun if stage_of(partition).state or not self._takes(partition)]:
            self._refuse(moved, reply)
            return
        stages.change(begun, PUBLISHING)
        if not wanted:
            turn.answer_when_durable(lambda: reply(None))
            return
        # In the order of the request. A stage whose publishing stopped at damage is tried again.
        queued = set(self._queue)
        self._queue.extend(partition for partition in wanted.values() if partition not in queued)
        self._requests.append(PublishRequest(set(wanted), reply))
        self.ready = True
        turn.answer_after_commit(None)

    def finish(self, target: Partition) -> None:
        """Commit, and check that no stage is being published to a partition; raises ``FlowControl`` while one is.

        Each call publishes one turn's worth, because the loop serves other requests too. Meanwhile no further stage is
        published to the partition.
        """
        turn, name = self._turn, target.row.name
        if self._busy_with(name) and turn.clock.monotonic() >= self._held_until:
            self.ready = True
            turn.answer_after_commit(None)
        turn.commit()
        if turn.failed is not None:
            raise turn.failed
        if self._busy_with(name):
            self._closing[name] = turn.clock.monotonic() + CLOSING_SECONDS
            full = ", and the disk is full" if turn.clock.monotonic() < self._held_until else ""
            raise FlowControl(f"stages are being published to {name!r}{full}; try again")
        self._closing.pop(name, None)

    def _busy_with(self, name: str) -> bool:
        return any(partition.row.name == name for partition in self._queue)

    def look(self) -> bool:
        """Set and return ``ready``: whether ``run`` has work to do."""
        waiting = len(self.unsynced) >= TURNS_AHEAD
        self.ready = bool(self._queue) and not waiting and self._turn.clock.monotonic() >= self._held_until
        return self.ready

    def synced(self) -> None:
        """Continue publishing if it waited for more of the message log to be durable."""
        durable = self._turn.message_log.durable
        while self.unsynced and self.unsynced[0] <= durable:
            self.unsynced.popleft()
        if self.look():
            self._turn.answer_after_commit(None)

    def run(self, now: int, commit: Commit) -> None:
        """Publish one turn's worth. Stages that find no space on the disk stay queued and are tried again."""
        self.ready = False
        turn = self._turn
        try:
            turn.refuse_when_full()
            write_messages(turn)
            room = PUBLISH_SIZE_MAX
            while self._queue and room > 0:
                room -= self._publish(self._queue[0], now, commit, room)
            self._forget()
        except OSError as error:
            self._held_until = turn.clock.monotonic() + RETRY_SECONDS
            turn.disk_error(error)
        except (DiskFull, ReadOnly, FlowControl):
            self._held_until = turn.clock.monotonic() + RETRY_SECONDS
        except StorageFailed:
            # ``turn.failed`` is set, and the server stops.
            return
        else:
            if self._queue:
                self.unsynced.append(turn.message_log.end)
                if self.look():
                    turn.answer_after_commit(None)

    def _publish(self, partition: Partition, now: int, commit: Commit, room: int) -> int:
        """Append up to ``room`` bytes of a stage's frames to their partition. Returns their size."""
        turn = self._turn
        size = 0
        stage = stage_of(partition)
        target = self._catalog.subjects.get(partition.row.name)
        if target is not None and stage.delayed:
            target = self._schedules.partition_of(partition.row.name)
        if target is not None:
            try:
                for frame, record in self._stages.frames(partition, partition.start):
                    turn.appender.copy(target, frame, turn.epoch, now, commit)
                    turn.touch(target)
                    partition.start = record.end
                    self._copied.add(record.offset, record.offset + record.size)
                    turn.touch(partition)
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
            self._catalog.delete([partition])
            self._queue.popleft()
            self._answer(stage.producer, None)
        return size

    def _forget(self) -> None:
        """Release the memory of the frames that this turn copied, so that the next copies can use it."""
        write_messages(self._turn)
        for start, end in self._copied.take():
            self._turn.message_log.forget(start, end)
        if not self._queue:
            self._copied.clear()

    def _answer(self, producer: int, error: PlaitError | None) -> None:
        """Answer the requests that wait for a stage: it is published, or ``error`` prevents that."""
        for request in list(self._requests):
            if producer not in request.producers:
                continue
            request.producers.discard(producer)
            if error is not None or not request.producers:
                self._requests.remove(request)
                self._turn.answer_when_durable(lambda reply=request.reply: reply(error))  # type: ignore[misc]

    def _check_closing(self, partitions: list[Partition]) -> None:
        """Raise if a seal waits for the target partition of one of these stages."""
        now = self._turn.clock.monotonic()
        self._closing = {name: until for name, until in self._closing.items() if now < until}
        for partition in partitions:
            if partition.row.name in self._closing:
                raise FlowControl(f"partition {partition.row.name!r} is being sealed; try again")

    def _refuse(self, moved: list[Partition], reply: Reply) -> None:
        """Permanently refuse stages whose keys have moved. They stay refused after a crash, and if the keys return.

        The driver that gets this reply writes the rows again elsewhere, so a later request must not publish them here.
        """
        self._stages.change([partition for partition in moved if not stage_of(partition).state], MOVED)
        producers = [stage_of(partition).producer for partition in moved]
        error = StaleRoute(
            f"partition {moved[0].row.name!r} no longer takes these keys; write the rows to the partitions "
            "of the current route",
            producer=producers[0],
            producers=producers,
        )
        self._turn.answer_when_durable(lambda: reply(error))

    def _takes(self, partition: Partition) -> bool:
        target = self._catalog.subjects.get(partition.row.name)
        return target is not None and (
            target.accepts is None
            # This reads only key hashes; ``_publish`` verifies the frames.
            or all(target.takes(frame) for frame, _ in self._stages.frames(partition, 0, trusted=True))
        )


class CopiedRanges:
    """Disjoint ranges of offsets that grow. Adding one takes constant time.

    The operating system frees only large pieces of memory. So ``take`` returns the whole merged range that a frame
    extends, not only the frame.
    """

    __slots__ = ("_ends", "_grown", "_starts")

    def __init__(self) -> None:
        #: The start of each range → its end, and the end → the start.
        self._ends: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        #: The starts of the ranges that are new or have grown since the last ``take``, oldest first.
        self._grown: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, start: int, end: int) -> None:
        """Add [start, end). It must not overlap with an earlier range."""
        start = self._starts.pop(start, start)
        if end in self._ends:
            self._grown.pop(end, None)
            end = self._ends.pop(end)
        self._ends[start] = end
        self._starts[end] = start
        self._grown[start] = None

    def take(self) -> list[tuple[int, int]]:
        """The ranges that are new or have grown since the last call."""
        grown, self._grown = self._grown, {}
        return [(start, self._ends[start]) for start in grown]

    def clear(self) -> None:
        self._ends.clear()
        self._starts.clear()
        self._grown.clear()
