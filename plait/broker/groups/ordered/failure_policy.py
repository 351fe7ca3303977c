"""Failed messages of an ordered group: retries, keys held back, parked keys.

A failed message of a strict subject holds back its key: the key gets its own cursor, and other keys continue. When the
message is out of attempts, the key is *parked* until an operator resumes it or skips the message. On other subjects
the failed message waits for its retry, and later messages of its key are delivered.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from plait.broker.groups.group import FAILURE, Group, NackOutcome
from plait.broker.groups.ordered.cursor_set import CursorSet
from plait.broker.groups.ordered.in_flight import InFlightRows
from plait.broker.groups.ordered.row_reader import RowReader, Sequences
from plait.broker.partitions.frame_search import FrameKeys
from plait.errors import LimitExceeded
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import NO_KEY_HASH
from plait.storage.cursor import Cursor
from plait.storage.logs.action_events import Parked, Resumed, Revived
from plait.storage.ranges import DueRanges, Range, joined

STRICT = "strict"


class FailurePolicy(msgspec.Struct, eq=False):
    """An ordered group's reaction to failed messages."""

    _group: Group
    _cursors: CursorSet
    _reader: RowReader
    _in_flight: InFlightRows

    @property
    def strict(self) -> bool:
        """True if a failed message holds back its key."""
        return self._group.partition.row.settings.order == STRICT and not self._group.definition.affinity

    def failed(
        self, cursor: Cursor, sequences: Sequences, keys: FrameKeys, attempt: int, now: int, failure: NackOutcome
    ) -> None:
        """Handle failed rows of a cursor. The caller has removed them from the held rows."""
        hashes = np.full(len(sequences), NO_KEY_HASH) if keys.hashes is None else keys.hashes
        # Rows without a key hold back nothing.
        holding = (hashes != NO_KEY_HASH) & self.strict
        for start, end in joined(sequences[~holding]):
            self._retry(cursor, Range(start, end, attempt), now, failure)
        held = zip(sequences[holding].tolist(), keys.lps[holding].tolist(), hashes[holding].tolist(), strict=True)
        for sequence, lp, key in held:
            row = Range(sequence, sequence + 1, attempt)
            self._hold(self._cursors.for_row(lp, key), row, lp, key, now, failure)

    def _retry(self, cursor: Cursor, piece: Range, now: int, failure: NackOutcome) -> None:
        for part, dead in self._group.split_dead(piece, failure, now):
            left = self._group.journal.bury(self._group, cursor.id, [part], failure.reason) if dead else [part]
            for each in left:
                self._wait_for(cursor, each, now, FAILURE if dead else failure)

    def _wait_for(self, cursor: Cursor, piece: Range, now: int, failure: NackOutcome) -> None:
        due = self._group.retry_time(piece, failure, now)
        self._in_flight.return_piece(cursor, piece, due, counted=failure.counted, now=now)

    def _hold(self, cursor: Cursor, row: Range, lp: int, key: int, now: int, failure: NackOutcome) -> None:
        """Hold back the key of a failed row of a strict subject, or park the key if the row is out of attempts."""
        if cursor.key is None:
            if cursor.held_rows is None:
                # Held rows are found once: each key that gets a cursor of its own takes its rows from them.
                cursor.set_held_rows(self._in_flight.find_held_rows(cursor))
            cursor = self._cursors.hold(cursor, lp, key)
            waiting, cursor.waiting = cursor.waiting, DueRanges()
            for due, pieces in waiting:
                for piece in pieces:
                    for sequences, _ in self._reader.rows(cursor, piece.start, piece.end):
                        for first, last in joined(sequences):
                            cursor.waiting.add(first, last, piece.attempt, due)
        # Rows in flight after the failed row return to the group: the failed row must be handled first.
        behind = [(tag, piece) for tag, held in cursor.held.items() for piece in held.overlap(row.end, cursor.next)]
        for tag, piece in behind:
            cursor.let_go(tag, piece.start, piece.end)
            self._in_flight.return_piece(cursor, piece, 0, counted=False)
        dead = any(dead for _, dead in self._group.split_dead(row, failure, now))
        if dead and not self._group.journal.bury(self._group, cursor.id, [row], failure.reason):
            self._park(cursor, row.start)
            return
        self._wait_for(cursor, row, now, FAILURE if dead else failure)

    def refuse_more_keys(self, parked: Iterable[int]) -> None:
        """``LimitExceeded`` if parking these keys would give too many keys a cursor of their own (``held_keys``)."""
        group, limit = self._group, self._group.limits.held_keys
        new = set(parked) - self._cursors.by_key.keys()
        keys = len(self._cursors.by_key) + len(new)
        if new and keys > limit:
            raise LimitExceeded(
                f"group {group.name!r} of {group.partition.row.subject!r} would have {keys} failed or parked keys, "
                f"above the limit of {limit} (limit `held_keys`); resume or skip parked keys",
                limit="held_keys",
                value=limit,
            )

    def inherit(self, parked: Iterable[int], resumed: Iterable[int]) -> None:
        """Park keys that are parked in the partition that had their rows before; resume keys resumed there."""
        known = self._cursors.by_key
        for key in [key for key in parked if key not in known or not known[key].parked]:
            lp = key % LOGICAL_PARTITIONS
            cursor = self._cursors.for_row(lp, key)
            if cursor.key is None:
                cursor = self._cursors.hold(cursor, lp, key)
                cursor.drop()
            self._park(cursor, -1)
        for key in resumed:
            if key in known and known[key].letter < 0:
                # A key with a dead letter in this partition stays parked until an operator decides about that letter.
                self.resume(key, skip=True)

    def _park(self, cursor: Cursor, letter: int) -> None:
        cursor.parked, cursor.letter = True, letter
        self._group.journal.event(self._group, Parked(cursor.id, max(letter, 0), letter + 1))

    def parked(self) -> list[Cursor]:
        """The cursors of parked keys."""
        return [cursor for cursor in self._cursors.by_key.values() if cursor.parked]

    def resume(self, key: int, *, skip: bool) -> bool:
        """Continue a parked key with the failed message, or after it (``skip``). Returns False if it is not parked."""
        cursor = self._cursors.by_key.get(key)
        if cursor is None or not cursor.parked:
            return False
        cursor.parked = False
        self._group.journal.event(self._group, Resumed(cursor.id))
        # Only this letter is revived, and only if it was not purged: letters that were skipped before stay dead.
        if not skip and self._group.failures.dead.overlap(cursor.letter, cursor.letter + 1):
            self._group.journal.event(self._group, Revived(cursor.id, cursor.letter, cursor.letter + 1))
            self.revive(cursor, cursor.letter, cursor.letter + 1)
        return True

    def revive(self, cursor: Cursor, start: int, end: int) -> None:
        """Deliver dead letters of a cursor in [start, end) again."""
        for piece in self._group.failures.revive(start, end, cursor.next):
            cursor.given_back(*piece)

    def revived(self, start: int, end: int) -> None:
        """Deliver dead letters in [start, end) again, each by its cursor."""
        pieces = self._group.failures.dead.overlap(start, end)
        for cursor in list(self._cursors):
            for piece in pieces:
                for sequences, _ in self._reader.rows(cursor, piece.start, piece.end):
                    for first, last in joined(sequences):
                        self._group.journal.event(self._group, Revived(cursor.id, first, last))
                        self.revive(cursor, first, last)
