"""The last rows that each producer stored, so that a resend is stored only once (R7-R9).

A producer numbers its rows over all partitions. A frame names its predecessor *in its partition*, and only the exact
successor of the last stored frame is new. The state is derived from the frames, and bounded: a producer is forgotten
after a week of silence. When there are too many producers, or pairs of producers and partitions, producers that have
been sending for less than ``PRODUCER_PROVEN_SECONDS`` (*unproven*) are forgotten first, then the longest silent.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum, auto
from typing import Final, NamedTuple

from plait.limits import PRODUCER_PROVEN_SECONDS, PRODUCER_WINDOWS_MAX

#: Producers are divided into shards by their id, and a checkpoint writes the shards that changed. Unchanged shards of
#: earlier checkpoints stay in use, so the number of shards is part of the format.
SHARDS: Final = 64


class FrameVerdict(Enum):
    """How a frame relates to what its producer has stored."""

    NEW = auto()
    DUPLICATE = auto()
    GAP = auto()
    UNKNOWN = auto()


_LOW: Final = (1 << 32) - 1
_PROVEN_MICROS: Final = int(PRODUCER_PROVEN_SECONDS * 1_000_000)

#: A constant, because Python 3.11 runs a function for each access to an enum member.
_NEW: Final = FrameVerdict.NEW


class StoredRun(NamedTuple):
    """Rows that were stored as one frame."""

    first: int
    last: int
    #: Partition sequence of the first row.
    base: int
    #: The predecessor named in the frame, and the checksum of the frame: a resend must have the same.
    previous: int
    crc: int


class ProducerWindow:
    """One producer in one partition."""

    __slots__ = ("holes", "last", "numbers")

    def __init__(self) -> None:
        self.last = 0
        #: Stored runs, four numbers each: first and previous producer sequence, partition sequence of the first row,
        #: and the row count with the checksum in the upper 32 bits. Objects would take six times the memory.
        self.numbers = array("Q")
        #: (after, through): the rows with producer sequences in (after, through] were lost to damage, although later
        #: rows are stored. A resend of them is stored as new.
        self.holes: list[tuple[int, int]] = []

    @property
    def runs(self) -> list[StoredRun]:
        """The latest stored runs, oldest first: a resend of one of them gets its receipt again."""
        numbers = iter(self.numbers)
        return [
            StoredRun(first, first + (packed & _LOW) - 1, base, previous, packed >> 32)
            for first, previous, base, packed in zip(numbers, numbers, numbers, numbers, strict=True)
        ]

    @classmethod
    def load(cls, last: int, runs: Iterable[Iterable[int]], holes: Iterable[Iterable[int]]) -> ProducerWindow:
        window = cls()
        window.last = last
        for first, last_row, base, previous, crc in runs:
            window.numbers.extend((first, previous, base, last_row - first + 1 | crc << 32))
        window.holes = [(after, through) for after, through in holes]
        return window

    def holds(self, first: int, last: int) -> bool:
        """True if all of [first, last] is stored: in the remembered runs, or older than all of them."""
        if last > self.last:
            return False
        runs = sorted(self.runs)
        missing = max(first, runs[0].first) if runs else last + 1
        for run in runs:
            if run.first <= missing <= run.last:
                missing = run.last + 1
        return missing > last

    def overlaps(self, first: int, last: int) -> bool:
        """True if a part of [first, last] is in the remembered runs."""
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
        #: The number of windows of all producers.
        self.window_count = 0
        self._seen: dict[int, int] = {}
        #: Unproven producers → the time of their first run, ordered by last use.
        self._new: OrderedDict[int, int] = OrderedDict()
        #: The producers of each shard, so that encoding a shard does not visit all producers.
        self.shards: list[set[int]] = [set() for _ in range(SHARDS)]
        #: For each shard, the message-log offset up to which its loaded checkpoint includes the frames.
        self.loaded_until = [0] * SHARDS
        #: Shards changed since the last checkpoint.
        self.dirty: set[int] = set()

    def __len__(self) -> int:
        return len(self._windows)

    def window(self, producer: int, partition: int) -> ProducerWindow | None:
        partitions = self._windows.get(producer)
        return partitions.get(partition) if partitions else None

    def judge(self, producer: int, partition: int, first: int, count: int, previous: int) -> FrameVerdict:
        """Whether rows [first, first + count), whose frame names ``previous`` as predecessor, are to be stored."""
        partitions = self._windows.get(producer)
        window = partitions.get(partition) if partitions else None
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
        """The remembered run with exactly these rows; None if there is none."""
        window = self.window(producer, partition)
        for run in reversed(window.runs if window else []):
            if (run.first, run.last) == (first, first + count - 1):
                return run
        return None

    def stored(
        self, producer: int, partition: int, first: int, count: int, previous: int, base: int, time: int, crc: int
    ) -> None:
        """Record that the run is in the log at sequences [base, base + count)."""
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
            self.window_count += 1
        last = first + count - 1
        if first <= window.last:
            self._fill(window, previous, last)
        else:
            if previous > window.last:
                window.holes.append((window.last, previous))
            window.last = last
        numbers = window.numbers
        numbers.extend((first, previous, base, count | crc << 32))
        if len(numbers) > 4 * self._window_frames:
            # Drop the oldest run.
            del numbers[:4]

    def _add(self, producer: int) -> dict[int, ProducerWindow]:
        partitions = self._windows[producer] = {}
        self.shards[producer % SHARDS].add(producer)
        return partitions

    @staticmethod
    def _fill(window: ProducerWindow, previous: int, last: int) -> None:
        """Shrink the hole of a lost run that was resent."""
        for index, (after, through) in enumerate(window.holes):
            if after == previous:
                if last >= through:
                    del window.holes[index]
                else:
                    window.holes[index] = (last, through)
                return

    def forget(self, now: int) -> list[int]:
        """Drop producers that were silent too long or are over the limits. Returns their ids."""
        gone = []
        while self._windows:
            producer = next(iter(self._windows))
            too_many = len(self._windows) > self._producers_max or self.window_count > self._windows_max
            if too_many:
                producer = next(iter(self._new), producer)
            elif now - self._seen[producer] < self._keep_micros:
                break
            self._new.pop(producer, None)
            self.window_count -= len(self._windows.pop(producer))
            self.shards[producer % SHARDS].discard(producer)
            del self._seen[producer]
            self.dirty.add(producer % SHARDS)
            gone.append(producer)
        return gone

    def forget_partition(self, partition: int) -> None:
        for producer, partitions in self._windows.items():
            if partitions.pop(partition, None) is not None:
                self.window_count -= 1
                self.dirty.add(producer % SHARDS)

    # --- checkpoint -----------------------------------------------------------------------------

    def dump(self, producers: Iterable[int]) -> list[object]:
        """The entries of the given producers as plain values; unknown producers are left out."""
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
        """Add entries of ``dump``. Call ``order`` after the last call."""
        for producer, seen, partitions in entries:
            windows = self._windows.get(producer)
            if windows is None:
                windows = self._add(producer)
            self._seen[producer] = seen
            before = len(windows)
            for partition, last, runs, holes in partitions:
                windows[partition] = ProducerWindow.load(last, runs, holes)
            self.window_count += len(windows) - before

    def order(self) -> None:
        """Restore the order of last use after loading."""
        self._windows = OrderedDict(sorted(self._windows.items(), key=lambda item: self._seen[item[0]]))

    def ids(self) -> Iterable[int]:
        return self._windows.keys()
