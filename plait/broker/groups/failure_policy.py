"""Failed messages of an ordered group: retries, keys held back, parked keys.

A failed message of a strict subject holds back its key: the key gets its own cursor, and other keys continue. When the
message is out of attempts, the key is *parked* until an operator resumes it or skips the message. On other subjects
the failed message waits for its retry, and later messages of its key are delivered.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from plait.broker.groups.in_flight import InFlightRows
from plait.broker.groups.row_reader import Sequences
from plait.broker.groups.shared_group import FAILURE, Journal, NackOutcome
from plait.broker.partitions.key_cache import FrameKeys
from plait.errors import LimitExceeded
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import NO_KEY_HASH
from plait.model.retry_policy import due_time
from plait.storage.cursor import Cursor
from plait.storage.due_ranges import DueRanges
from plait.storage.logs.action_log import Action
from plait.storage.pull_log import count_of
from plait.storage.ranges import Range, joined


class FailurePolicy(InFlightRows):
    """An ordered group's reaction to failed messages."""

    __slots__ = ()

    def _failed(
        self,
        cursor: Cursor,
        sequences: Sequences,
        keys: FrameKeys,
        attempt: int,
        journal: Journal,
        now: int,
        failure: NackOutcome,
    ) -> None:
        """Rows of a cursor failed. The caller has removed them from the held rows."""
        hashes = np.full(len(sequences), NO_KEY_HASH) if keys.hashes is None else keys.hashes
        # Rows without a key hold back nothing.
        holding = (hashes != NO_KEY_HASH) & self.strict
        for start, end in joined(sequences[~holding]):
            self._retry(cursor, Range(start, end, attempt), journal, now, failure)
        held = zip(sequences[holding].tolist(), keys.lps[holding].tolist(), hashes[holding].tolist(), strict=True)
        for sequence, lp, key in held:
            row = Range(sequence, sequence + 1, attempt)
            self._hold(self.cursors.for_row(lp, key), row, lp, key, journal, now, failure)

    def _retry(self, cursor: Cursor, piece: Range, journal: Journal, now: int, failure: NackOutcome) -> None:
        for part, dead in self._split_dead(piece, failure, self._old_before(piece, now)):
            left = journal.bury(self, cursor.id, [part], failure.reason) if dead else [part]
            for each in left:
                self._wait_for(cursor, each, journal, now, FAILURE if dead else failure)

    def _wait_for(self, cursor: Cursor, piece: Range, journal: Journal, now: int, failure: NackOutcome) -> None:
        seconds = self.retry.wait(piece.attempt, self._chance(piece)) if failure.delay is None else failure.delay
        counted = failure.counted
        self._return_piece(cursor, piece, due_time(now, seconds), journal, counted=counted, now=now)

    def _hold(
        self, cursor: Cursor, row: Range, lp: int, key: int, journal: Journal, now: int, failure: NackOutcome
    ) -> None:
        """A row of a strict subject failed: hold back its key, or park the key if the row is out of attempts."""
        if cursor.key is None:
            if cursor.held_rows is None:
                # Found once for all keys that fail: each split takes the rows of its key.
                cursor.set_held_rows(self._find_held_rows(journal, cursor))
            cursor = self.cursors.hold(cursor, lp, key)
            waiting, cursor.waiting = cursor.waiting, DueRanges()
            for due, pieces in waiting:
                for piece in pieces:
                    for sequences, _ in self._rows(journal, cursor, piece.start, piece.end):
                        for first, last in joined(sequences):
                            cursor.waiting.add(first, last, piece.attempt, due)
        # Held rows after the failed row return to the group: the failed row must be handled first.
        behind = [(tag, piece) for tag, held in cursor.held.items() for piece in held.overlap(row.end, cursor.next)]
        for tag, piece in behind:
            cursor.let_go(tag, piece.start, piece.end)
            self._return_piece(cursor, piece, 0, journal, counted=False)
        dead = any(dead for _, dead in self._split_dead(row, failure, self._old_before(row, now)))
        if dead and not journal.bury(self, cursor.id, [row], failure.reason):
            self._park(cursor, row.start, journal)
            return
        self._wait_for(cursor, row, journal, now, FAILURE if dead else failure)

    def refuse_more_keys(self, parked: Iterable[int]) -> None:
        """``LimitExceeded`` if these keys would exceed the limit of keys with their own cursor."""
        new = set(parked) - self.cursors.by_key.keys()
        keys = len(self.cursors.by_key) + len(new)
        if new and keys > self.limits.held_keys:
            raise LimitExceeded(
                f"group {self.name!r} of {self.partition.row.subject!r} would have {keys} failed or parked keys, "
                f"above the limit of {self.limits.held_keys} (limit `held_keys`); resume or skip parked keys",
                limit="held_keys",
                value=self.limits.held_keys,
            )

    def inherit(self, parked: Iterable[int], resumed: Iterable[int], journal: Journal) -> None:
        """Park keys that are parked in the partition that had their rows before; resume keys that it resumed."""
        known = self.cursors.by_key
        for key in [key for key in parked if key not in known or not known[key].parked]:
            lp = key % LOGICAL_PARTITIONS
            cursor = self.cursors.for_row(lp, key)
            if cursor.key is None:
                cursor = self.cursors.hold(cursor, lp, key)
                cursor.drop()
            self._park(cursor, -1, journal)
        for key in resumed:
            if key in known and known[key].letter < 0:
                # A key with a dead letter in this partition stays parked until an operator decides about that letter.
                self.resume(key, journal, skip=True)

    def _park(self, cursor: Cursor, letter: int, journal: Journal) -> None:
        cursor.parked, cursor.letter = True, letter
        journal.event(Action.PARK, self, cursor.id, max(letter, 0), letter + 1, 0)

    def parked(self) -> list[Cursor]:
        """The cursors of parked keys."""
        return [cursor for cursor in self.cursors.by_key.values() if cursor.parked]

    def resume(self, key: int, journal: Journal, *, skip: bool) -> bool:
        """Continue a parked key with the failed message, or after it (``skip``). Returns False if it is not parked."""
        cursor = self.cursors.by_key.get(key)
        if cursor is None or not cursor.parked:
            return False
        cursor.parked = False
        journal.event(Action.RESUME, self, cursor.id, 0, 0, 0)
        # Only this letter is revived, and only if it was not purged: letters that were skipped before stay dead.
        if not skip and self.pull_log.dead.overlap(cursor.letter, cursor.letter + 1):
            journal.event(Action.REVIVE, self, cursor.id, cursor.letter, cursor.letter + 1, 0)
            self._revive(cursor, cursor.letter, cursor.letter + 1)
        return True

    def _revive(self, cursor: Cursor, start: int, end: int) -> None:
        for first, last, attempt in self.pull_log.dead.remove(start, end):
            self.pull_log.resent.add(first, last, attempt)
            cursor.given_back(first, last, attempt)

    def buried(self, cursor: int, start: int, end: int, attempt: int, now: int) -> None:
        """[start, end) of a cursor became dead letters."""
        found = self.cursors.get(cursor)
        if found is not None:
            found.settled(start, end)
        self.pull_log.buried(0, start, end, attempt, now)

    def revived(self, start: int, end: int, journal: Journal) -> int:
        """Deliver dead letters in [start, end) again, each by its cursor; how many sequences."""
        pieces = self.pull_log.dead.overlap(start, end)
        for cursor in list(self.cursors):
            for piece in pieces:
                for sequences, _ in self._rows(journal, cursor, piece.start, piece.end):
                    for first, last in joined(sequences):
                        journal.event(Action.REVIVE, self, cursor.id, first, last, 0)
                        self._revive(cursor, first, last)
        return count_of(pieces)

    @property
    def next_due(self) -> int | None:
        """When the next waiting row is due; None: no row waits."""
        dues = [due for cursor in self.cursors if cursor.waiting and (due := cursor.waiting.next_due) is not None]
        return min(dues, default=None)

    def return_due(self, now: int) -> bool:
        """Make waiting rows that are due ready for delivery; whether there are any."""
        ready = [cursor for cursor in self.cursors if cursor.waiting and cursor.return_due(now)]
        return bool(ready)
