"""The failed rows of a group: when each failed first, which became dead letters, which were resent."""

from __future__ import annotations

from plait.storage.ranges import Range, Ranges, count_of


class Failures:
    """Failed rows of one group in one partition. Every row of a range has failed, in ordered groups too."""

    __slots__ = ("dead", "failing", "resent")

    def __init__(self) -> None:
        #: Dead letters: not delivered again unless an operator resends them.
        self.dead = Ranges()
        #: Failed rows. The attempt of a range is the time of its first failure, in seconds since 1970.
        self.failing = Ranges()
        #: Dead letters that were resent, with the attempts they had: later attempts count from there.
        self.resent = Ranges()

    def note(self, start: int, end: int, time: int) -> None:
        """Record ``time`` as the first failure of [start, end), except where one is recorded."""
        for first, last, _ in self.failing.overlap(start, end):
            if start < first:
                self.failing.add(start, first, time // 1_000_000)
            start = last
        self.failing.add(start, end, time // 1_000_000)

    def forget(self, start: int, end: int) -> None:
        """Forget [start, end), which is done or skipped."""
        self.failing.remove(start, end)
        self.resent.remove(start, end)

    def bury(self, start: int, end: int, attempt: int, time: int) -> None:
        """Record that [start, end) became dead letters."""
        self.note(start, end, time)
        self.resent.remove(start, end)
        self.dead.add(start, end, attempt)

    def revive(self, start: int, end: int, passed: int) -> tuple[list[Range], int]:
        """Record that the dead letters in [start, end) are resent; their attempts start from 0 again.

        Returns the ranges to deliver again, and the number of dead letters. The ranges end at ``passed``, because after
        a reset to an earlier sequence the cursor delivers the later rows anyway.
        """
        letters = self.dead.remove(start, end)
        again = [Range(first, min(last, passed), attempt) for first, last, attempt in letters if first < passed]
        for piece in again:
            self.resent.add(*piece)
        return again, count_of(letters)

    def purge(self, start: int, end: int) -> int:
        """Remove the dead letters in [start, end), which are purged. Returns the number of sequences."""
        letters = self.dead.remove(start, end)
        for first, last, _ in letters:
            self.failing.remove(first, last)
        return count_of(letters)

    def reset(self) -> None:
        """Forget all failures except dead letters, because the group continues from another sequence."""
        self.resent.clear()
        self.failing = Ranges(piece for start, end, _ in self.dead for piece in self.failing.overlap(start, end))

    def dump(self) -> tuple[bytes, bytes, bytes]:
        """The state for a checkpoint."""
        return self.dead.pack(), self.failing.pack(), self.resent.pack()

    def load(self, state: tuple[bytes, bytes, bytes]) -> None:
        """Restore the state of a checkpoint."""
        self.dead, self.failing, self.resent = map(Ranges.unpack, state)
