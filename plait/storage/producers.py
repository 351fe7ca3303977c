"""What each producer stored last, so that a resend stores nothing twice (R7-R9).

Sequences count per producer over all partitions; a frame names its predecessor *in its partition*, and only the exact
successor of what is stored is new. The state is derived from the frames and bounded: silent producers are forgotten
after a week, the longest silent first when there are too many of them, or when they sent to too many partitions. Of
too many, those go first that are new.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import Final, NamedTuple

from plait.limits import PRODUCER_PROVEN_SECONDS, PRODUCER_WINDOWS_MAX

#: Producers are in shards by their number: a checkpoint encodes the shards in which something changed. A shard that
#: is not written stays as it was, so the number is one of the format.
SHARDS: Final = 64


def shard_of(producer: int) -> int:
    """The shard that a producer is in."""
    return producer % SHARDS


class FrameVerdict(Enum):
    """What a frame is to the state."""

    NEW = auto()
    DUPLICATE = auto()
    GAP = auto()
    UNKNOWN = auto()


_LOW: Final = (1 << 32) - 1
_PROVEN_MICROS: Final = int(PRODUCER_PROVEN_SECONDS * 1_000_000)

#: Looked up once: Python 3.11 runs a function for each look at a member.
_NEW: Final = FrameVerdict.NEW


class StoredRun(NamedTuple):
    """Rows that were stored as one frame of their producer."""

    first: int
    last: int
    #: Partition sequence of the first row.
    base: int
    #: The predecessor that the frame named, and the checksum of the frame: what a resend is compared with.
    previous: int
    crc: int


class ProducerWindow:
    """One producer in one partition."""

    __slots__ = ("_numbers", "holes", "last")

    def __init__(self) -> None:
        self.last = 0
        #: Stored runs, four numbers each: first and previous producer sequence, partition sequence of the first row,
        #: rows with the checksum above them. An object for each would take six times the memory.
        self._numbers = array("Q")
        #: (after, through): sequences that were lost to damage between stored ones; a resend of them is new.
        self.holes: list[tuple[int, int]] = []

    @property
    def runs(self) -> list[StoredRun]:
        """The latest stored runs, oldest first: what receipts can be given again for."""
        numbers = iter(self._numbers)
        return [
            StoredRun(first, first + (packed & _LOW) - 1, base, previous, packed >> 32)
            for first, previous, base, packed in zip(numbers, numbers, numbers, numbers, strict=True)
        ]

    def remember(self, run: StoredRun, frames_max: int) -> None:
        """A run was stored; of those before it the oldest goes when there are too many."""
        self._add(*run)
        if len(self._numbers) > 4 * frames_max:
            del self._numbers[:4]

    def _add(self, first: int, last: int, base: int, previous: int, crc: int) -> None:
        self._numbers.extend((first, previous, base, last - first + 1 | crc << 32))

    @classmethod
    def load(cls, last: int, runs: Iterable[Iterable[int]], holes: Iterable[Iterable[int]]) -> ProducerWindow:
        """As a checkpoint has it."""
        window = cls()
        window.last = last
        for run in runs:
            window._add(*run)
        window.holes = [(after, through) for after, through in holes]
        return window

    def holds(self, first: int, last: int) -> bool:
        """All of [first, last] is stored: it is in the runs that are remembered, or older than all of them."""
        if last > self.last:
            return False
        runs = sorted(self.runs)
        missing = max(first, runs[0].first) if runs else last + 1
        for run in runs:
            if run.first <= missing <= run.last:
                missing = run.last + 1
        return missing > last

    def overlaps(self, first: int, last: int) -> bool:
        """Some of [first, last] is in the runs that are remembered."""
        return any(run.first <= last and first <= run.last for run in self.runs)


class ProducerTable:
    """All producers of a broker; the order of the dictionary is the order of last use."""

    def __init__(
        self,
        *,
        producers_max: int,
        window_frames: int,
        keep_seconds: float,
        windows_max: int = PRODUCER_WINDOWS_MAX,
    ) -> None:
        self._producers_max = producers_max
        self._windows_max = windows_max
        self._window_frames = window_frames
        self._keep_micros = int(keep_seconds * 1_000_000)
        self._windows: OrderedDict[int, dict[int, ProducerWindow]] = OrderedDict()
        self._window_count = 0
        self._seen: dict[int, int] = {}
        #: When those that are not proven yet stored their first run; the longest silent first.
        self._new: OrderedDict[int, int] = OrderedDict()
        #: Who is in each shard: encoding one does not walk through all.
        self._shards: list[set[int]] = [set() for _ in range(SHARDS)]
        #: Frames of the message log before these offsets are taken account of, by shard, as a checkpoint says.
        self._loaded_until = [0] * SHARDS
        #: Shards changed since the last checkpoint.
        self.dirty: set[int] = set()

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def window_count(self) -> int:
        """Windows of all producers."""
        return self._window_count

    def window(self, producer: int, partition: int) -> ProducerWindow | None:
        partitions = self._windows.get(producer)
        return partitions.get(partition) if partitions else None

    def judge(self, producer: int, partition: int, first: int, count: int, previous: int) -> FrameVerdict:
        """Whether [first, first + count), which says it follows ``previous``, is to be stored."""
        window = self.window(producer, partition)
        if window is None:
            return FrameVerdict.NEW if previous == 0 else FrameVerdict.UNKNOWN
        last = first + count - 1
        if previous == window.last and first > window.last:
            return _NEW
        for after, through in window.holes:
            if previous == after and last <= through:
                return FrameVerdict.NEW
        return FrameVerdict.DUPLICATE if window.holds(first, last) else FrameVerdict.GAP

    def find(self, producer: int, partition: int, first: int, count: int) -> StoredRun | None:
        """The remembered run of exactly these rows."""
        window = self.window(producer, partition)
        for run in reversed(window.runs if window else []):
            if (run.first, run.last) == (first, first + count - 1):
                return run
        return None

    def stored(
        self, producer: int, partition: int, first: int, count: int, previous: int, base: int, time: int, crc: int
    ) -> None:
        """The run is in the log at sequences [base, base + count)."""
        partitions = self._windows.get(producer)
        if partitions is None:
            partitions = self._add(producer)
            self._new[producer] = time
        else:
            self._windows.move_to_end(producer)
            since = self._new.get(producer)
            if since is not None:
                if time - since < _PROVEN_MICROS:
                    self._new.move_to_end(producer)
                else:
                    del self._new[producer]
        self._seen[producer] = time
        self.dirty.add(producer % SHARDS)
        window = partitions.get(partition)
        if window is None:
            window = partitions[partition] = ProducerWindow()
            self._window_count += 1
        last = first + count - 1
        if first <= window.last:
            self._fill(window, previous, last)
        else:
            if previous > window.last:
                window.holes.append((window.last, previous))
            window.last = last
        window.remember(StoredRun(first, last, base, previous, crc), self._window_frames)

    def _add(self, producer: int) -> dict[int, ProducerWindow]:
        partitions = self._windows[producer] = {}
        self._shards[shard_of(producer)].add(producer)
        return partitions

    @staticmethod
    def _fill(window: ProducerWindow, previous: int, last: int) -> None:
        """A lost run came again: shrink the hole it was in."""
        for index, (after, through) in enumerate(window.holes):
            if after == previous:
                if last >= through:
                    del window.holes[index]
                else:
                    window.holes[index] = (last, through)
                return

    def forget(self, now: int) -> list[int]:
        """Drop who was silent too long, and the longest silent over the limits; their ids."""
        gone = []
        while self._windows:
            producer = next(iter(self._windows))
            too_many = len(self._windows) > self._producers_max or self._window_count > self._windows_max
            if too_many:
                producer = next(iter(self._new), producer)
            elif now - self._seen[producer] < self._keep_micros:
                break
            self._new.pop(producer, None)
            self._window_count -= len(self._windows.pop(producer))
            self._shards[shard_of(producer)].discard(producer)
            del self._seen[producer]
            self.dirty.add(producer % SHARDS)
            gone.append(producer)
        return gone

    def forget_partition(self, partition: int) -> None:
        """The partition was deleted."""
        for producer, partitions in self._windows.items():
            if partitions.pop(partition, None) is not None:
                self._window_count -= 1
                self.dirty.add(producer % SHARDS)

    # --- checkpoint -----------------------------------------------------------------------------

    def dump(self, producers: Iterable[int]) -> list[object]:
        """Plain values of those of the given producers that are known, at the cost of these alone."""
        return [
            (
                producer,
                self._seen[producer],
                [(p, w.last, w.runs, w.holes) for p, w in self._windows[producer].items()],
            )
            for producer in producers
            if producer in self._windows
        ]

    def load(self, entries: Iterable[tuple[int, int, list[tuple[int, int, list[list[int]], list[list[int]]]]]]) -> None:
        """Add what ``dump`` gave; call ``order`` after the last of several."""
        for producer, seen, partitions in entries:
            windows = self._windows.get(producer)
            if windows is None:
                windows = self._add(producer)
            self._seen[producer] = seen
            before = len(windows)
            for partition, last, runs, holes in partitions:
                windows[partition] = ProducerWindow.load(last, runs, holes)
            self._window_count += len(windows) - before

    def load_until(self, shard: int, offset: int) -> None:
        """What is loaded of a shard takes account of the frames before an offset of the message log."""
        self._loaded_until[shard] = offset

    def loaded_until(self, producer: int) -> int:
        """Frames before this offset are known to the producer's entry, as a checkpoint had it."""
        return self._loaded_until[shard_of(producer)]

    def order(self) -> None:
        """Restore the order of last use after loading."""
        self._windows = OrderedDict(sorted(self._windows.items(), key=lambda item: self._seen[item[0]]))

    def ids(self) -> Iterable[int]:
        return self._windows.keys()

    def count_in_shard(self, index: int) -> int:
        """Producers in a shard."""
        return len(self._shards[index])

    def in_shard(self, index: int) -> Iterator[int]:
        """The ids in a shard, in no order that counts."""
        return iter(self._shards[index])
