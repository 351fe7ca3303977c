"""The failed rows of a group: when each failed first, which became dead letters, which were resent."""

from __future__ import annotations

from plait.storage.ranges import Range, Ranges, count_of


class Failures:
    """Failed rows of one group in one partition. A range contains no other rows, in ordered groups too."""

    __slots__ = ("dead", "failing", "resent")

    def __init__(self) -> None:
        #: Dead letters: not delivered again unless an operator resends them.
        self.dead = Ranges()
        #: When each range failed first: seconds since 1970, in the place of the attempt.
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
        """[start, end) is done or skipped."""
        self.failing.remove(start, end)
        self.resent.remove(start, end)

    def bury(self, start: int, end: int, attempt: int, time: int) -> None:
        """[start, end) became dead letters."""
        self.note(start, end, time)
        self.resent.remove(start, end)
        self.dead.add(start, end, attempt)

    def revive(self, start: int, end: int, passed: int) -> tuple[list[Range], int]:
        """The dead letters in [start, end) are resent, and their attempts count from 0 again.

        Returns the ranges to deliver again, and the number of sequences. Only ranges below ``passed`` are returned:
        after a reset to an earlier sequence the cursor reaches the others anyway.
        """
        letters = self.dead.remove(start, end)
        again = [Range(first, min(last, passed), attempt) for first, last, attempt in letters if first < passed]
        for piece in again:
            self.resent.add(*piece)
        return again, count_of(letters)

    def purge(self, start: int, end: int) -> int:
        """The dead letters in [start, end) are purged. Returns the number of sequences."""
        letters = self.dead.remove(start, end)
        for first, last, _ in letters:
            self.failing.remove(first, last)
        return count_of(letters)

    def reset(self) -> None:
        """The group continues from another sequence: only dead letters stay."""
        self.resent.clear()
        self.failing = Ranges(piece for start, end, _ in self.dead for piece in self.failing.overlap(start, end))

    def dump(self) -> tuple[bytes, bytes, bytes]:
        """The state for a checkpoint."""
        return self.dead.pack(), self.failing.pack(), self.resent.pack()

    def load(self, state: tuple[bytes, bytes, bytes]) -> None:
        """Restore the state of a checkpoint."""
        self.dead, self.failing, self.resent = map(Ranges.unpack, state)
