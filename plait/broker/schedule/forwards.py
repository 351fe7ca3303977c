"""Forwards due rows to the partition that their LP has moved to (R20, R25).

A row that becomes due after its LP has moved must not enter the partition that scheduled it, because consumers do not
read rows of the LP from the fence on. The row is appended to a *forward partition* instead; there is one for each
target partition. The same frame names the row's number and so settles it in the schedule: it is one write. The
server then sends the frames, unchanged and in order, to the partition that the route leads to. The header of a frame
has the producer of the forward partition and numbers its rows, so the other broker stores each frame once, however
often it is sent.

If the route has changed and the other broker is known not to have stored a frame, that frame and all later frames are
copied unchanged back into the schedule. The header of a copy names the rows of the forward partition that it takes
back, so this is again one write. The rows are due at once and follow the newer route. A forward partition from which
frames were taken back gets no more rows and is deleted, because the other broker would wait for the missing frames.
If this broker crashes before it has taken all of them back, it sends the rest again. The other broker refuses them
because of the gap, and they are taken back too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from plait.broker.catalog import Catalog
from plait.broker.commit import Commit
from plait.broker.partitions.partition import Partition
from plait.broker.schedule.schedules import Schedules
from plait.broker.turn import Turn, write_messages
from plait.errors import DamageError, FrameError
from plait.frame.columns import Column
from plait.frame.header import FLAG_FORWARDED
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS, MIB
from plait.model.logical_partitions import NO_KEY_HASH, keyed_lps
from plait.storage.catalog import FORWARD, Forward, PartitionRow
from plait.storage.logs.consume_log import stored_frame

#: An empty forward partition is deleted when it got no rows for this long: well before the other broker
#: forgets its producer (``ServerLimits.producer_seconds``).
IDLE_SECONDS: Final = 86_400.0

#: The catalog records the progress of the other broker after this many frames. The other broker recognizes more resent
#: frames than this (``ServerLimits.producer_window_frames``).
NOTE_FRAMES: Final = 16

#: Bytes that one turn takes back: the loop serves other requests too.
TAKE_BACK_SIZE_MAX: Final = 8 * MIB

#: Columns that a forwarded frame cannot have.
_REFUSED_BITS: Final = 1 << Column.SELECTION | 1 << Column.NOTE

#: (partition name, broker group).
Place = tuple[str, str]


class ForwardRoute(NamedTuple):
    """The newest known route of a subject: for each LP an index into ``places``."""

    table: npt.NDArray[np.int64]
    places: list[Place]


class WaitingForward(NamedTuple):
    """The first frame of a forward partition, and the end of its rows.

    It may be sent once the message log is durable up to ``log_end``.
    """

    frame: FrameView
    end: int
    log_end: int


class Forwards:
    """All forward partitions of a broker, and the routes that it knows."""

    def __init__(self, turn: Turn, catalog: Catalog, schedules: Schedules) -> None:
        self._turn = turn
        self._catalog = catalog
        self._schedules = schedules
        self._all: dict[int, Partition] = {}
        self._by_place: dict[tuple[str, Place], Partition] = {}
        self._by_producer: dict[int, Partition] = {}
        #: Partition → (frames stored since the last progress row in the catalog, log offset where that row ends).
        self._notes: dict[int, tuple[int, int]] = {}
        self._routes: dict[str, ForwardRoute] = {}
        #: Subjects whose route is unknown while due rows wait for it.
        self.unrouted: set[str] = set()
        #: Called when there are frames to send, or a route to look up.
        self.on_work: Callable[[], None] = lambda: None
        catalog.kinds[FORWARD] = self

    # --- adding and removing --------------------------------------------------------------------

    def add(self, partition: Partition) -> None:
        forward = _forward(partition)
        self._all[partition.id] = partition
        self._by_place[partition.row.name, (forward.name, forward.group)] = partition
        self._by_producer[forward.producer] = partition

    def remove(self, partition: Partition) -> None:
        forward = _forward(partition)
        self._all.pop(partition.id, None)
        self._close(partition)
        self._by_producer.pop(forward.producer, None)
        self._notes.pop(partition.id, None)

    def _close(self, partition: Partition) -> None:
        """Add no more rows to a forward partition: later rows for the same target get another one."""
        forward = _forward(partition)
        place = partition.row.name, (forward.name, forward.group)
        if self._by_place.get(place) is partition:
            del self._by_place[place]

    def of(self, name: str) -> list[Partition]:
        return [partition for partition in self._all.values() if partition.row.name == name]

    def waiting(self) -> list[Partition]:
        return [partition for partition in self._all.values() if partition.start < partition.next]

    def _to(self, source: Partition, place: Place) -> Partition:
        known = self._by_place.get((source.row.name, place))
        if known is not None:
            return known
        turn = self._turn
        number, created = self._catalog.next_partition, turn.clock.now()
        # Unique, also among the logs of a broker group that is created again under the same name.
        text = f"{turn.config.group}/{number}/{created}/{turn.epoch}/{turn.message_log.end}/{place}"
        forward = Forward(xxh3_64_intdigest(text.encode()) | 1, *place)
        row = PartitionRow(number, source.row.subject, source.row.name, created, kind=FORWARD, forward=forward)
        return self._catalog.create(row)

    # --- where rows go --------------------------------------------------------------------------

    def learn(self, subject: str, route: ForwardRoute) -> None:
        self._routes[subject] = route
        self.unrouted.discard(subject)
        self._schedules.release(self._schedules.postponed(subject))

    def forget(self, subject: str) -> None:
        """Drop the route of a subject: a partition of it was deleted, perhaps the last one here."""
        self._routes.pop(subject, None)

    def fits(self, partition: Partition, frame: FrameView) -> bool:
        """Whether the known route leads all rows of a frame to the target of this forward partition."""
        route = self._routes.get(partition.row.subject)
        forward = _forward(partition)
        place = (forward.name, forward.group)
        if route is None or place not in route.places:
            return False
        here = route.table == route.places.index(place)
        lps = keyed_lps(frame.key_hashes())
        return bool(here[lps].all() if len(lps) else here.any())

    def split(
        self, target: Partition, hashes: npt.NDArray[np.uint64] | None, numbers: npt.NDArray[np.int64]
    ) -> list[tuple[Partition, npt.NDArray[np.int64]]] | None:
        """Split rows with these key hashes by the partition that they are appended to: (partition, row indices).

        Returns None when some rows must follow the route and it is not known.
        """
        accepts = target.accepts
        assert accepts is not None
        lps = numbers % LOGICAL_PARTITIONS
        keyed = np.zeros(len(numbers), bool)
        if hashes is not None:
            keyed = hashes != NO_KEY_HASH
            lps = np.where(keyed, (hashes % np.uint64(LOGICAL_PARTITIONS)).astype(np.int64), lps)
        # Rows without keys may enter any partition that takes rows of some LP.
        here = np.where(keyed, accepts[lps], accepts.any())
        if here.all():
            return [(target, np.arange(len(numbers)))]
        subject = target.row.subject
        route = self._routes.get(subject)
        own = (target.row.name, self._turn.config.group)
        if route is None or own in {route.places[index] for index in np.unique(route.table[lps[~here]]).tolist()}:
            # The route is unknown, or older than the seal.
            self._routes.pop(subject, None)
            self.unrouted.add(subject)
            self.on_work()
            return None
        found = [(target, np.flatnonzero(here))] if here.any() else []
        towards = np.where(here, -1, route.table[lps])
        found += [
            (self._to(target, route.places[index]), np.flatnonzero(towards == index))
            for index in np.unique(towards[~here]).tolist()
        ]
        self.on_work()
        return found

    # --- rows leave -----------------------------------------------------------------------------

    def first(self, partition: Partition) -> WaitingForward | None:
        """The next frame to send; None when there is none."""
        log, records = self._turn.message_log, partition.consume_log
        # A forward partition of a deleted subject has nothing to send.
        while partition.id in self._all and partition.start < partition.next:
            index = records.find(partition.start)
            record = records.record(index) if index < len(records) else None
            if record is None:
                partition.start = partition.next
                return None
            try:
                if record.offset >= log.start:
                    write_messages(self._turn)
                    frame = stored_frame(log, partition.id, record)
                    _, noted = self._notes.get(partition.id, (0, 0))
                    return WaitingForward(frame, record.end, max(record.offset + record.size, noted))
                # Retention deleted the segment, so the other broker had the rows; a crash lost that progress.
            except (FrameError, DamageError) as error:
                self._schedules.report("message", f"{error} (at {record.offset})", record.count)
            self._passed(partition, record.end)
        return None

    def stored(self, partition: Partition, end: int) -> None:
        """Record that the other broker has stored the frame that ends at ``end``.

        A crash may lose this progress for a few frames: they are resent, and the other broker recognizes them.
        """
        if partition.id not in self._all:
            return
        self._passed(partition, end)
        count, noted = self._notes.get(partition.id, (0, 0))
        count += 1
        if count >= NOTE_FRAMES:
            forward = msgspec.structs.replace(_forward(partition), stored=end)
            self._catalog.change([msgspec.structs.replace(partition.row, forward=forward)])
            count, noted = 0, self._turn.message_log.end
        self._notes[partition.id] = count, noted

    def _passed(self, partition: Partition, end: int) -> None:
        partition.start = max(partition.start, end)
        self._turn.touch(partition)

    def take_back(self, partition: Partition) -> bool:
        """Take back rows that the other broker does not have: they are due at once and follow the newer route.

        One call takes back about ``TAKE_BACK_SIZE_MAX`` bytes. Returns False when there are more: call it again.
        """
        turn = self._turn
        if partition.id not in self._all:
            return True
        self._close(partition)
        commit = Commit()
        schedule = self._schedules.partition_of(partition.row.name)
        size = 0
        try:
            while size < TAKE_BACK_SIZE_MAX:
                waiting = self.first(partition)
                if waiting is None:
                    self._catalog.delete([partition])
                    return True
                turn.appender.copy(schedule, waiting.frame, turn.epoch, turn.clock.now(), commit)
                turn.touch(schedule)
                self._passed(partition, waiting.end)
                size += waiting.frame.size
        except OSError as error:
            raise turn.disk_error(error) from error
        finally:
            self._schedules.take_in(commit)
            turn.answer_after_commit(None)
        return False

    def expire(self) -> None:
        """Delete forward partitions that have been empty for ``IDLE_SECONDS``."""
        late = self._turn.clock.now() - int(IDLE_SECONDS * 1_000_000)
        for partition in list(self._all.values()):
            records = partition.consume_log
            last = records.record(len(records) - 1).time if len(records) else partition.row.created
            if partition.start >= partition.next and last < late:
                self._catalog.delete([partition])

    # --- at the other broker --------------------------------------------------------------------

    @staticmethod
    def check(partition: Partition, frame: FrameView, *, answered: bool) -> None:
        """Refuse a frame from another broker that cannot be stored."""
        if partition.row.kind:
            raise FrameError("a forwarded frame belongs in the subject's own partition; send it there")
        if frame.flags != FLAG_FORWARDED or not frame.has(Column.RUNS) or frame.column_bits & _REFUSED_BITS:
            raise FrameError(
                "a forwarded frame has a run table with the ids of its rows, and no selection or note column"
            )
        if not answered:
            raise FrameError("a forwarded frame must not be sent oneway: the sender needs to know whether it is stored")

    # --- recovery -------------------------------------------------------------------------------

    def replay(self, offset: int, frame: FrameView) -> None:
        """Replay a frame of a schedule partition that was taken back."""
        partition = self._by_producer.get(frame.producer)
        if partition is not None and offset >= partition.position.message:
            self._passed(partition, frame.first + frame.count - 1)

    def replay_note(self, partition: Partition) -> None:
        """Replay the progress of the other broker from a catalog row."""
        self._passed(partition, _forward(partition).stored)


def _forward(partition: Partition) -> Forward:
    forward = partition.row.forward
    assert forward is not None
    return forward
