"""Reads the rows of cursors: finds them, and cuts pieces of frames that hold only these rows.

It reads no rows outside the ranges that the caller asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.broker.groups.cursor_set import CursorSet
from plait.broker.groups.row_counts import RowCounter, lost_ranges
from plait.broker.groups.shared_group import Delivery, Group, Journal
from plait.broker.partitions.key_cache import FrameKeys
from plait.broker.partitions.partition import Partition
from plait.errors import FrameError
from plait.frame.builder import Buffer
from plait.frame.columns import Column
from plait.frame.slicing import slice_mask, slice_rows
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS, ServerLimits
from plait.model.logical_partitions import NO_KEY_HASH, LpSet
from plait.model.lp_numbers import LpNumbers
from plait.storage.cursor import NO_KEYS, Cursor
from plait.storage.held_rows import HeldRowArrays
from plait.storage.logs.action_log import FLAG_ESTIMATED, Action, GroupDefinition
from plait.storage.ranges import joined

STRICT = "strict"
#: Rows that one pull examines at most. A pull that found none by then gets an empty delivery, and pulls again.
LOOK_MAX = 1 << 20

Sequences = npt.NDArray[np.int64]


class FoundRows(NamedTuple):
    """The rows of a frame with sequences [first, last); None: they cannot be read."""

    first: int
    last: int
    frame: FrameView | None


class FramePiece(NamedTuple):
    """Chosen rows of a frame, with sequences in [first, last). The frame was examined up to ``end``."""

    first: int
    last: int
    end: int
    rows: int
    size: int
    #: Bytes that its compressed columns inflate to.
    inflated: int
    parts: list[Buffer]
    #: The indexes of the rows in the frame.
    places: Sequences


class RowTake:
    """One pull, while it is served."""

    __slots__ = ("delivery", "full", "looked", "rows", "size")

    def __init__(self, count: int, size: int) -> None:
        self.delivery = Delivery()
        #: The pull ends at this many rows, or about this many bytes.
        self.rows = count
        self.size = size
        self.looked = 0
        #: A piece did not fit, so the pull ends. The next pull starts with it and takes it whatever its size.
        self.full = False

    @property
    def room(self) -> int:
        return self.rows - self.delivery.count

    @property
    def more(self) -> bool:
        """There is room for more rows, and the pull has not examined too many."""
        delivery = self.delivery
        fits = not self.full and (not delivery.count or delivery.weight < self.size)
        return fits and self.room > 0 and self.looked < LOOK_MAX

    def takes(self, size: int) -> bool:
        """Whether a piece of ``size`` bytes fits; if not, the pull ends."""
        self.full = bool(self.delivery.count) and self.delivery.weight + size > self.size
        return not self.full

    def limit(self, count: int) -> None:
        """Take at most ``count`` more rows."""
        self.rows = min(self.rows, self.delivery.count + count)


#: Two ranges with at most this many rows between them are read together.
TABLE_GAP = 10_000


class RowTable:
    """Rows by sequence, with their keys."""

    __slots__ = ("rows",)

    def __init__(self, parts: list[tuple[Sequences, FrameKeys]]) -> None:
        hashes = [np.full(len(keys.lps), NO_KEY_HASH) if keys.hashes is None else keys.hashes for _, keys in parts]
        self.rows = HeldRowArrays(
            np.concatenate([np.empty(0, np.int64), *(each for each, _ in parts)]),
            np.concatenate([np.empty(0, np.uint16), *(keys.lps for _, keys in parts)]),
            np.concatenate([np.empty(0, np.uint64), *hashes]),
        )

    def of(self, cursor: Cursor, start: int, end: int) -> tuple[Sequences, FrameKeys] | None:
        """A cursor's rows in [start, end); None: there are none."""
        low, high = np.searchsorted(self.rows.sequences, (start, end)).tolist()
        chosen = cursor.chooses(self.rows.lps[low:high], self.rows.hashes[low:high])
        if not chosen.any():
            return None
        sequences, lps, hashes = self.rows.where(low + np.flatnonzero(chosen))
        return sequences, FrameKeys(lps, hashes)


class Chooser:
    """Tells which rows belong to any of several cursors."""

    __slots__ = ("_keys", "_lps", "_without", "all")

    def __init__(self, cursors: list[Cursor]) -> None:
        wide = [cursor for cursor in cursors if cursor.key is None]
        self._lps: LpSet = wide[0].lps if wide else np.zeros(LOGICAL_PARTITIONS, bool)
        without = wide[0].without if wide else NO_KEYS
        for cursor in wide[1:]:
            self._lps = self._lps | cursor.lps
            without = without | cursor.without
        keys = {cursor.key for cursor in cursors if cursor.key is not None}
        self._without = np.fromiter(without - keys, np.uint64, len(without - keys))
        # Keys whose logical partitions are not in ``_lps``.
        alone = [key for key in keys if not self._lps[key % LOGICAL_PARTITIONS]]
        self._keys = np.array(alone, np.uint64)
        #: Every row belongs to one of the cursors.
        self.all = not len(self._without) and bool(self._lps.all())

    def __call__(self, keys: FrameKeys) -> npt.NDArray[np.bool_]:
        chosen: npt.NDArray[np.bool_] = self._lps[keys.lps]
        if keys.hashes is not None:
            if len(self._without):
                chosen &= ~np.isin(keys.hashes, self._without)
            if len(self._keys):
                chosen |= np.isin(keys.hashes, self._keys)
        return chosen


class _EventRecorder:
    """Records events of a group's cursors. A closure would take three times the memory, in each group."""

    __slots__ = ("_group", "_journal")

    def __init__(self, group: Group, journal: Journal) -> None:
        self._group = group
        self._journal = journal

    def __call__(self, action: Action, cursor: int, start: int, end: int, value: int, attempt: int) -> None:
        self._journal.event(action, self._group, cursor, start, end, attempt, value)


class RowReader(Group):
    """The part of an ordered group that finds and reads rows."""

    __slots__ = ("cursors", "wanted_until")

    def __init__(
        self, definition: GroupDefinition, partition: Partition, limits: ServerLimits, journal: Journal
    ) -> None:
        super().__init__(definition, partition, limits)
        #: Consumer id → the sequence up to which it wants rows of each logical partition; 0: no limit.
        self.wanted_until: dict[int, LpNumbers] = {}
        self.cursors = CursorSet(definition.start, _EventRecorder(self, journal))

    @property
    def logs_pulls(self) -> bool:
        """Pulls are not recorded: rows that an owner has not acked are delivered again."""
        return False

    @property
    def strict(self) -> bool:
        """A failed message holds back its key."""
        return self.partition.row.settings.order == STRICT and not self.definition.affinity

    def _parent(self, key: Cursor) -> Cursor:
        """The cursor of a key's logical partition."""
        assert key.key is not None
        return self.cursors.of_lp(key.key % LOGICAL_PARTITIONS)

    def _is_behind(self, cursor: Cursor) -> bool:
        """A key's cursor has not caught up with the cursor of its logical partition."""
        return bool(cursor.returned or cursor.waiting) or cursor.next < self._parent(cursor).next

    def _cut(self, frame: FrameView, chooser: Chooser, first: int, last: int, taking: RowTake) -> FramePiece | None:
        """The chosen rows of a frame in [first, last), up to the room of the pull; None: the piece does not fit."""
        sequences = frame.sequences()
        low, high = np.searchsorted(sequences, [first, last]).tolist()
        taking.looked += high - low
        if chooser.all:
            rows = np.arange(low, min(high, low + taking.room))
        else:
            rows = low + np.flatnonzero(chooser(self.partition.keys.of(frame))[low:high])
            rows = rows[: taking.room]
        if not len(rows):
            return FramePiece(first, first, last, 0, 0, 0, [], rows)
        end = last if len(rows) < taking.room else int(sequences[rows[-1]]) + 1
        try:
            parts, size = select(frame, rows)
        except FrameError:
            # The frame is damaged: its rows cannot be separated.
            return FramePiece(first, first, last, 0, 0, 0, [], rows[:0])
        if not taking.takes(size + frame.inflated_size):
            return None
        begin, stop = int(sequences[rows[0]]), int(sequences[rows[-1]]) + 1
        return FramePiece(begin, stop, end, len(rows), size, frame.inflated_size, parts, rows)

    def _of_key(self, frame: FrameView, piece: FramePiece, key: int) -> list[tuple[int, int]]:
        """[first, last) of the rows of a key in a piece of a frame."""
        hashes = self.partition.keys.of(frame).hashes
        if hashes is None:
            return []
        return joined(frame.sequences()[piece.places[hashes[piece.places] == np.uint64(key)]])

    def _walk(self, journal: Journal, start: int, end: int, *, again: bool) -> Iterator[FoundRows]:
        """The frames with rows in [start, end). Rows below the partition's start come from the retained log."""
        known = self.partition.start
        self.partition.expire_deleted(journal.message_log)
        retained_until = min(end, self.partition.start)
        if start < retained_until:
            for found in self._retained_rows(journal, start, retained_until):
                if (lost := max(start, known)) < found.first:
                    yield FoundRows(lost, found.first, None)
                yield found
                start = found.last
            if (lost := max(start, known)) < retained_until:
                # Rows of a deleted segment that were not retained. A crash lost the event that skips them.
                yield FoundRows(lost, retained_until, None)
            start = retained_until
        if start < end:
            for place in self.partition.walk(journal.message_log, start, end, again=again):
                yield FoundRows(*place)

    def _retained_rows(self, journal: Journal, start: int, end: int) -> Iterator[FoundRows]:
        """The frames of the retained log with rows in [start, end)."""
        sequences = self.retained.within(start, end)
        places = self.retained.places(sequences.tolist())
        edges = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)] if len(places) else []
        for a, b in pairwise(edges):
            frame = self.frame_of(journal.message_log, journal.retained_log, int(sequences[a]))
            yield FoundRows(int(sequences[a]), int(sequences[b - 1]) + 1, frame)

    def _rows(self, journal: Journal, cursor: Cursor, start: int, end: int) -> Iterator[tuple[Sequences, FrameKeys]]:
        """The sequences of a cursor's rows in [start, end), with their keys."""
        for sequences, keys in self._all_rows(journal, start, end):
            chosen = cursor.chooses(keys.lps, keys.hashes)
            if chosen.any():
                hashes = None if keys.hashes is None else keys.hashes[chosen]
                yield sequences[chosen], FrameKeys(keys.lps[chosen], hashes)

    def _skip_rows(self, counter: RowCounter, cursor: Cursor, first: int, last: int, journal: Journal) -> None:
        """Skip a cursor's rows in [first, last). The event stores their count, since replay cannot count them."""
        rows = counter.count(cursor, lost_ranges(cursor, first, last))
        self._lost(rows, estimated=not counter.exact)
        flags = 0 if counter.exact else FLAG_ESTIMATED
        journal.event(Action.SKIP, self, cursor.id, first, last, 0, due=rows, flags=flags)
        cursor.skipped(first, last)

    def _lost(self, rows: int, *, estimated: bool) -> None:
        self.lost_count += rows
        self.lost_estimated |= estimated and rows > 0

    def count_rows(self, journal: Journal, cursor: Cursor, ranges: Iterable[tuple[int, int]]) -> int:
        """How many rows of a cursor lie in [start, end) ranges."""
        return sum(len(rows) for start, end in ranges for rows, _ in self._rows(journal, cursor, start, end))

    def _all_rows(self, journal: Journal, start: int, end: int) -> Iterator[tuple[Sequences, FrameKeys]]:
        self.partition.expire_deleted(journal.message_log)
        retained_until = min(end, self.partition.start)
        if start < retained_until:
            for first, last, frame in self._walk(journal, start, retained_until, again=True):
                if frame is not None:
                    keys, sequences = self.partition.keys.of(frame), frame.sequences()
                    low, high = np.searchsorted(sequences, [first, last]).tolist()
                    hashes = None if keys.hashes is None else keys.hashes[low:high]
                    yield sequences[low:high], FrameKeys(keys.lps[low:high], hashes)
        for first, last, keys in self.partition.keys_in(journal.message_log, max(start, retained_until), end):
            yield np.arange(first, last), keys

    def _table(self, journal: Journal, ranges: list[tuple[int, int]]) -> RowTable:
        """All rows within ranges, of all cursors."""
        return RowTable([found for start, end in spans_of(ranges) for found in self._all_rows(journal, start, end)])


def spans_of(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges, sorted, with those near each other joined."""
    spans: list[tuple[int, int]] = []
    for start, end in sorted(piece for piece in ranges if piece[0] < piece[1]):
        if spans and start <= spans[-1][1] + TABLE_GAP:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return spans


def select(frame: FrameView, rows: npt.NDArray[np.int64]) -> tuple[list[Buffer], int]:
    """Cut rows of a frame, in ascending order, into a new frame."""
    first, last = int(rows[0]), int(rows[-1]) + 1
    if last - first == len(rows):
        if len(rows) == frame.count:
            return [frame.buffer], frame.size
        if not frame.has(Column.SELECTION):
            piece = slice_rows(frame, first, last)
            return piece.parts, piece.size
    mask = np.zeros(frame.count, bool)
    mask[rows] = True
    piece = slice_mask(frame, mask)
    return piece.parts, piece.size
