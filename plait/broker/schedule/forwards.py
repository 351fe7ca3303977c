"""Delayed rows on their way to another partition (R20, R25).

A row that becomes due after its logical partition has moved must not enter the partition that it waited at: consumers
do not look behind the fence. It is appended to a *forward partition* instead, one for each place that rows go to, in a
frame that settles its number in the schedule: one write, which a crash cannot take apart. From there the server sends
the frames, as they are and in order, to the partition that the route leads to. The frame's header names the forward
partition's producer and counts its rows, so the other broker stores each frame once, however often it is sent.

When the other broker has definitely not stored a frame and the route leads elsewhere by now, that frame and all behind
it are copied, as they are, back into the schedule. The copy's header says which rows of the forward partition it takes
back: again one write. The rows are due at once and follow the newer route. A forward partition from which frames were
taken back gets no more rows and is deleted, as the other broker would wait for the missing ones. After a crash in
between, the other broker refuses the rest because of the gap, and that is taken back too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from plait.broker.appender import Appended
from plait.broker.partitions.partition import Partition
from plait.broker.subjects import create_partition, drop_partition
from plait.errors import DamageError, FrameError
from plait.frame.columns import Column
from plait.frame.header import FLAG_FORWARDED
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS, MIB
from plait.model.logical_partitions import NO_KEY_HASH, keyed_lps
from plait.storage.catalog import FORWARD, Forward, PartitionRow

if TYPE_CHECKING:
    from plait.broker.broker import Broker

#: An empty forward partition is deleted when nothing was added to it for this long: well before the other broker
#: forgets its producer (``ServerLimits.producer_seconds``).
IDLE_SECONDS: Final = 86_400.0

#: The catalog says how far the other broker has come after so many frames: well fewer than the other broker can tell
#: from new ones when they are sent again (``ServerLimits.producer_window_frames``).
NOTE_FRAMES: Final = 16

#: Bytes that are taken back in one turn: the loop has others to serve.
TAKE_BACK_SIZE_MAX: Final = 8 * MIB

#: Columns that a forwarded frame cannot have.
_REFUSED_BITS: Final = 1 << Column.SELECTION | 1 << Column.NOTE

#: A partition's name, and the broker group that has it.
Place = tuple[str, str]


class ForwardRoute(NamedTuple):
    """Where the newest known route of a subject leads: for each logical partition an index of ``places``."""

    table: npt.NDArray[np.int64]
    places: list[Place]


class WaitingForward(NamedTuple):
    """The first frame of a forward partition, and where its rows end.

    It is sent once the message log is durable up to ``log_end``.
    """

    frame: FrameView
    end: int
    log_end: int


class Forwards:
    """All forward partitions of a broker, and what it knows of routes."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._all: dict[int, Partition] = {}
        self._by_place: dict[tuple[str, Place], Partition] = {}
        self._by_producer: dict[int, Partition] = {}
        #: Partition → frames that were stored since the last note, and where that note ends in the message log.
        self._notes: dict[int, tuple[int, int]] = {}
        self._ways: dict[str, ForwardRoute] = {}
        #: Subjects whose route has to be found out, as rows wait for it.
        self.astray: set[str] = set()
        #: Called when there is something to send, or a route to find out.
        self.on_work: Callable[[], None] = lambda: None

    # --- which there are ------------------------------------------------------------------------

    def add(self, partition: Partition) -> None:
        """A forward partition is known."""
        forward = _forward(partition)
        self._all[partition.id] = partition
        self._by_place[partition.row.name, (forward.name, forward.group)] = partition
        self._by_producer[forward.producer] = partition

    def remove(self, partition: Partition) -> None:
        """A forward partition is gone."""
        forward = _forward(partition)
        self._all.pop(partition.id, None)
        self._close(partition)
        self._by_producer.pop(forward.producer, None)
        self._notes.pop(partition.id, None)

    def _close(self, partition: Partition) -> None:
        """No more rows are added to it: others that go to the same place get another forward partition."""
        forward = _forward(partition)
        place = partition.row.name, (forward.name, forward.group)
        if self._by_place.get(place) is partition:
            del self._by_place[place]

    def of(self, name: str) -> list[Partition]:
        """Those with rows that waited at the partition ``name``."""
        return [partition for partition in self._all.values() if partition.row.name == name]

    def waiting(self) -> list[Partition]:
        """Those that have rows to send."""
        return [partition for partition in self._all.values() if partition.start < partition.next]

    def _to(self, source: Partition, place: Place) -> Partition:
        known = self._by_place.get((source.row.name, place))
        if known is not None:
            return known
        broker = self._broker
        number, created = broker.next_partition, broker.clock.now()
        # Unlike that of any other, also in the log of a broker group that is made again under the same name.
        text = f"{broker.config.group}/{number}/{created}/{broker.epoch}/{broker.message_log.end}/{place}"
        forward = Forward(xxh3_64_intdigest(text.encode()) | 1, *place)
        row = PartitionRow(number, source.row.subject, source.row.name, created, kind=FORWARD, forward=forward)
        return create_partition(broker, row)

    # --- where rows go --------------------------------------------------------------------------

    def learn(self, subject: str, way: ForwardRoute) -> None:
        """The newest route of a subject leads there."""
        self._ways[subject] = way
        self.astray.discard(subject)
        self._broker.schedules.route_known(subject)

    def forget(self, subject: str) -> None:
        """A partition of the subject was deleted, perhaps the last one here."""
        self._ways.pop(subject, None)

    def fits(self, partition: Partition, frame: FrameView) -> bool:
        """Whether the known route leads all rows of a frame to where this forward partition sends them."""
        way = self._ways.get(partition.row.subject)
        forward = _forward(partition)
        place = (forward.name, forward.group)
        if way is None or place not in way.places:
            return False
        here = way.table == way.places.index(place)
        lps = keyed_lps(frame)
        return bool(here[lps].all() if len(lps) else here.any())

    def ways(
        self, target: Partition, hashes: npt.NDArray[np.uint64] | None, numbers: npt.NDArray[np.int64]
    ) -> list[tuple[Partition, npt.NDArray[np.int64]]] | None:
        """Partitions that rows with these key hashes are appended to, and which of them each gets.

        None: some are to go where the route leads, and that is not known.
        """
        accepts = target.accepts
        assert accepts is not None
        lps = numbers % LOGICAL_PARTITIONS
        keyed = np.zeros(len(numbers), bool)
        if hashes is not None:
            keyed = hashes != NO_KEY_HASH
            lps = np.where(keyed, (hashes % np.uint64(LOGICAL_PARTITIONS)).astype(np.int64), lps)
        # Rows without keys may enter any partition that takes rows at all.
        here = np.where(keyed, accepts[lps], accepts.any())
        if here.all():
            return [(target, np.arange(len(numbers)))]
        subject = target.row.subject
        way = self._ways.get(subject)
        own = (target.row.name, self._broker.config.group)
        if way is None or own in {way.places[index] for index in np.unique(way.table[lps[~here]]).tolist()}:
            # Not known, or as of before the seal.
            self._ways.pop(subject, None)
            self.astray.add(subject)
            self.on_work()
            return None
        found = [(target, np.flatnonzero(here))] if here.any() else []
        towards = np.where(here, -1, way.table[lps])
        found += [
            (self._to(target, way.places[index]), np.flatnonzero(towards == index))
            for index in np.unique(towards[~here]).tolist()
        ]
        self.on_work()
        return found

    # --- rows leave -----------------------------------------------------------------------------

    def first(self, partition: Partition) -> WaitingForward | None:
        """What is to be sent next; None: nothing."""
        broker, records = self._broker, partition.consume_log
        log = broker.message_log
        # One whose subject was deleted meanwhile has nothing to send any more.
        while partition.id in self._all and partition.start < partition.next:
            index = records.find(partition.start)
            record = records.record(index) if index < len(records) else None
            if record is None:
                partition.start = partition.next
                return None
            end = record.base + record.count
            try:
                if record.offset >= log.start:
                    broker.schedules.write()
                    frame = FrameView(log.view(record.offset, record.size)).verify()
                    if (frame.partition, frame.base, frame.count) != (partition.id, record.base, record.count):
                        raise FrameError("another frame stands there")
                    _, noted = self._notes.get(partition.id, (0, 0))
                    return WaitingForward(frame, end, max(record.offset + record.size, noted))
                # Retention took the segment, so the rows were stored, and a crash took the memory of it.
            except (FrameError, DamageError) as error:
                broker.schedules.report("message", f"{error} (at {record.offset})", record.count)
            self._passed(partition, end)
        return None

    def stored(self, partition: Partition, end: int) -> None:
        """The other broker has the frame that ends at ``end``.

        A crash may take that back for a few frames: they are sent again, and the other broker knows them.
        """
        broker = self._broker
        if partition.id not in self._all:
            return
        self._passed(partition, end)
        count, noted = self._notes.get(partition.id, (0, 0))
        count += 1
        if count >= NOTE_FRAMES:
            row = msgspec.structs.replace(
                partition.row, forward=msgspec.structs.replace(_forward(partition), stored=end)
            )
            broker.heads.define([row])
            partition.row = row
            count, noted = 0, broker.message_log.end
        self._notes[partition.id] = count, noted

    def _passed(self, partition: Partition, end: int) -> None:
        partition.start = max(partition.start, end)
        self._broker.touch(partition)

    def take_back(self, partition: Partition) -> bool:
        """The other broker has none of the rows that are left: they are due again, by the newer route.

        A turn's worth of them; False: there are more, call it again.
        """
        broker = self._broker
        if partition.id not in self._all:
            return True
        self._close(partition)
        appended = Appended()
        schedule = broker.schedules.partition_of(partition.row.name)
        size = 0
        try:
            while size < TAKE_BACK_SIZE_MAX:
                waiting = self.first(partition)
                if waiting is None:
                    self._delete(partition)
                    return True
                broker.appender.copy(schedule, waiting.frame, broker.epoch, broker.clock.now(), appended)
                broker.touch(schedule)
                self._passed(partition, waiting.end)
                size += waiting.frame.size
        except OSError as error:
            raise broker.disk_error(error) from error
        finally:
            broker.schedules.take_in(appended)
            broker.answer_after_commit(None)
        return False

    def expire(self) -> None:
        """Delete those that have been empty for long."""
        late = self._broker.clock.now() - int(IDLE_SECONDS * 1_000_000)
        for partition in list(self._all.values()):
            records = partition.consume_log
            last = records.record(len(records) - 1).time if len(records) else partition.row.created
            if partition.start >= partition.next and last < late:
                self._delete(partition)

    def _delete(self, partition: Partition) -> None:
        broker = self._broker
        broker.heads.define([msgspec.structs.replace(partition.row, deleted=True)])
        drop_partition(broker, partition)

    # --- at the other broker --------------------------------------------------------------------

    @staticmethod
    def check(partition: Partition, frame: FrameView, *, answered: bool) -> None:
        """A frame that another broker forwards can be stored."""
        if partition.row.kind:
            raise FrameError("a forwarded frame goes to a subject's own partition")
        if frame.flags != FLAG_FORWARDED or not frame.has(Column.RUNS) or frame.column_bits & _REFUSED_BITS:
            raise FrameError("a forwarded frame holds whole rows, with their ids in a run table")
        if not answered:
            raise FrameError("a forwarded frame is not sent oneway: whether it is stored counts")

    # --- recovery -------------------------------------------------------------------------------

    def replay(self, offset: int, frame: FrameView) -> None:
        """A frame in a schedule that was taken back."""
        partition = self._by_producer.get(frame.producer)
        if partition is not None and offset >= partition.position.message:
            self._passed(partition, frame.first + frame.count - 1)

    def replay_note(self, partition: Partition) -> None:
        """The catalog says how far the other broker has come."""
        self._passed(partition, _forward(partition).stored)


def _forward(partition: Partition) -> Forward:
    forward = partition.row.forward
    assert forward is not None
    return forward
