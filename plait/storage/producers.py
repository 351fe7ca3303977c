"""What each producer stored last, so that a resend stores nothing twice (R7-R9).

Sequences count per producer over all partitions; a frame names its predecessor *in its partition*, and only the exact
successor of what is stored is new. The state is derived from the frames and bounded: silent producers are forgotten
after a week, the longest silent first when there are too many.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum, auto
from typing import NamedTuple


class Verdict(Enum):
    """What a frame is to the state."""

    NEW = auto()
    DUPLICATE = auto()
    GAP = auto()
    UNKNOWN = auto()


class StoredFrame(NamedTuple):
    """A stored run: producer sequences [first, last] became partition sequences from ``base``."""

    first: int
    last: int
    base: int


class Window:
    """One producer in one partition."""

    __slots__ = ("frames", "holes", "last")

    def __init__(self) -> None:
        self.last = 0
        #: The latest stored runs, oldest first: what receipts can be given again for.
        self.frames: list[StoredFrame] = []
        #: (after, through): sequences that were lost to damage between stored ones; a resend of them is new.
        self.holes: list[tuple[int, int]] = []

    def holds(self, first: int, last: int) -> bool:
        """All of [first, last] is stored: it is in the runs that are remembered, or older than all of them."""
        if last > self.last:
            return False
        frames = sorted(self.frames)
        missing = max(first, frames[0].first) if frames else last + 1
        for frame in frames:
            if frame.first <= missing <= frame.last:
                missing = frame.last + 1
        return missing > last


class ProducerTable:
    """All producers of a broker; the order of the dictionary is the order of last use."""

    def __init__(self, *, producers_max: int, window_frames: int, keep_seconds: float) -> None:
        self._producers_max = producers_max
        self._window_frames = window_frames
        self._keep_micros = int(keep_seconds * 1_000_000)
        self._windows: OrderedDict[int, dict[int, Window]] = OrderedDict()
        self._seen: dict[int, int] = {}
        #: Producers changed since the last checkpoint.
        self.dirty: set[int] = set()

    def __len__(self) -> int:
        return len(self._windows)

    def window(self, producer: int, partition: int) -> Window | None:
        partitions = self._windows.get(producer)
        return partitions.get(partition) if partitions else None

    def judge(self, producer: int, partition: int, first: int, count: int, previous: int) -> Verdict:
        """Whether [first, first + count), which says it follows ``previous``, is to be stored."""
        window = self.window(producer, partition)
        if window is None:
            return Verdict.NEW if previous == 0 else Verdict.UNKNOWN
        last = first + count - 1
        if previous == window.last and first > window.last:
            return Verdict.NEW
        for after, through in window.holes:
            if previous == after and last <= through:
                return Verdict.NEW
        return Verdict.DUPLICATE if window.holds(first, last) else Verdict.GAP

    def receipt(self, producer: int, partition: int, first: int, count: int = 1) -> int | None:
        """The sequence that the first of stored rows got; None when it is too long ago to know, or they lie apart."""
        window = self.window(producer, partition)
        for frame in reversed(window.frames if window else []):
            if frame.first <= first and first + count - 1 <= frame.last:
                return frame.base + first - frame.first
        return None

    def stored(
        self, producer: int, partition: int, first: int, count: int, previous: int, base: int, time: int
    ) -> None:
        """The run is in the log at sequences [base, base + count)."""
        partitions = self._windows.get(producer)
        if partitions is None:
            partitions = self._windows[producer] = {}
        else:
            self._windows.move_to_end(producer)
        self._seen[producer] = time
        self.dirty.add(producer)
        window = partitions.get(partition)
        if window is None:
            window = partitions[partition] = Window()
        last = first + count - 1
        if first <= window.last:
            self._fill(window, previous, last)
        else:
            if previous > window.last:
                window.holes.append((window.last, previous))
            window.last = last
        window.frames.append(StoredFrame(first, last, base))
        if len(window.frames) > self._window_frames:
            del window.frames[0]

    @staticmethod
    def _fill(window: Window, previous: int, last: int) -> None:
        """A lost run came again: shrink the hole it was in."""
        for index, (after, through) in enumerate(window.holes):
            if after == previous:
                if last >= through:
                    del window.holes[index]
                else:
                    window.holes[index] = (last, through)
                return

    def forget(self, now: int) -> list[int]:
        """Drop who was silent too long, and the longest silent over the limit; their ids."""
        gone = []
        while self._windows:
            producer = next(iter(self._windows))
            if len(self._windows) <= self._producers_max and now - self._seen[producer] < self._keep_micros:
                break
            del self._windows[producer]
            del self._seen[producer]
            self.dirty.add(producer)
            gone.append(producer)
        return gone

    def forget_partition(self, partition: int) -> None:
        """The partition was deleted."""
        for producer, partitions in self._windows.items():
            if partitions.pop(partition, None) is not None:
                self.dirty.add(producer)

    # --- checkpoint -----------------------------------------------------------------------------

    def dump(self, producers: Iterable[int]) -> list[object]:
        """Plain values of the given producers, in order of last use."""
        wanted = set(producers)
        return [
            [
                producer,
                self._seen[producer],
                [[p, w.last, w.frames, w.holes] for p, w in partitions.items()],
            ]
            for producer, partitions in self._windows.items()
            if producer in wanted
        ]

    def load(self, entries: Iterable[tuple[int, int, list[tuple[int, int, list[list[int]], list[list[int]]]]]]) -> None:
        """Add what ``dump`` gave; call ``order`` after the last of several."""
        for producer, seen, partitions in entries:
            windows = self._windows.setdefault(producer, {})
            self._seen[producer] = seen
            for partition, last, frames, holes in partitions:
                window = windows[partition] = Window()
                window.last = last
                window.frames = [StoredFrame(*frame) for frame in frames]
                window.holes = [(after, through) for after, through in holes]

    def order(self) -> None:
        """Restore the order of last use after loading."""
        self._windows = OrderedDict(sorted(self._windows.items(), key=lambda item: self._seen[item[0]]))

    def ids(self) -> Iterable[int]:
        return self._windows.keys()
