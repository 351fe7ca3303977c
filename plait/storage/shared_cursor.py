"""The cursor of a shared group: it also has the rows that ``next`` has passed and that no consumer has begun.

Such rows are left where rows behind them were delivered first, because of their priority or for fairness, where a
consumer returned rows that it had not begun, and where the delivery of rows that were acked was not recorded. They are
new rows in every respect except that they are below ``next``: retention expires them and copies none.
"""

from __future__ import annotations

from plait.storage.cursor import ALL, Cursor, CursorState
from plait.storage.ranges import Range, Ranges


class SharedCursor(Cursor):
    """The position of a shared group in a partition."""

    __slots__ = ()
    passed: Ranges

    def __init__(self, start: int) -> None:
        super().__init__(0, ALL, start)
        self.passed = Ranges()

    def unbegun(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of [start, end) that no consumer has begun."""
        found = [(first, last) for first, last, _ in self.passed.overlap(start, end)]
        return [*found, (max(start, self.next), end)] if end > self.next else found

    def new_below(self, end: int) -> list[tuple[int, int]]:
        """Ranges below ``end`` with all rows that no consumer has begun, and with no row that was begun."""
        first, found = min(self.passed.first if self.passed else end, self.next), []
        for piece in sorted(self.begun(first, end)):
            found.append((first, piece.start))
            first = piece.end
        return [(low, high) for low, high in (*found, (first, end)) if low < high]

    def overtaken(self, start: int) -> bool:
        """Whether rows below ``start`` that no consumer has begun are left."""
        return start > self.next or (self.passed.length > 0 and self.passed.first < start)

    def skipped(self, start: int, end: int) -> tuple[list[Range], int]:
        passed = self.passed.remove(start, end)
        lost, count = super().skipped(start, end)
        return lost, count + sum(last - first for first, last, _ in passed)

    def reset(self, sequence: int) -> None:
        super().reset(sequence)
        self.passed.clear()

    def rewound(self, sequence: int) -> None:
        self.passed.remove(sequence, self.next)
        super().rewound(sequence)

    @property
    def floor(self) -> int:
        floor = super().floor
        return min(floor, self.passed.first) if self.passed else floor

    def dump(self, *, durable_holds: bool) -> CursorState:
        state = super().dump(durable_holds=durable_holds)
        state.returned.extend(self.passed)
        return state

    def restore(self, state: CursorState) -> None:
        """Set the state of a checkpoint."""
        loaded = Cursor.load(state)
        self.next, self.held, self.waiting = loaded.next, loaded.held, loaded.waiting
        self.returned = Ranges(piece for piece in loaded.returned if piece.attempt)
        self.passed = Ranges(piece for piece in loaded.returned if not piece.attempt)
