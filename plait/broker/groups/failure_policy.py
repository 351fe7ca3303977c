"""What becomes of messages of an ordered group that failed.

Those of a strict subject get their key a strand of its own, which waits alone; out of attempts it is *parked* until
somebody resumes it or skips the message. Otherwise what failed waits by itself and its key goes on.
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
    """See the module."""

    __slots__ = ()

    def _failed(
        self,
        strand: Cursor,
        sequences: Sequences,
        keys: FrameKeys,
        attempt: int,
        journal: Journal,
        now: int,
        failure: NackOutcome,
    ) -> None:
        """Rows of a strand, which are in nobody's hands any more, failed."""
        hashes = np.full(len(sequences), NO_KEY_HASH) if keys.hashes is None else keys.hashes
        # Keyless rows never hold.
        holding = (hashes != NO_KEY_HASH) & self.strict
        for start, end in joined(sequences[~holding]):
            self._retry(strand, Range(start, end, attempt), journal, now, failure)
        held = zip(sequences[holding].tolist(), keys.lps[holding].tolist(), hashes[holding].tolist(), strict=True)
        for sequence, lp, key in held:
            row = Range(sequence, sequence + 1, attempt)
            self._hold(self.strands.for_row(lp, key), row, lp, key, journal, now, failure)

    def _retry(self, strand: Cursor, piece: Range, journal: Journal, now: int, failure: NackOutcome) -> None:
        for part, dies in self._fates(piece, failure, self._old_before(piece, now)):
            left = journal.bury(self, strand.id, [part], failure.reason) if dies else [part]
            for each in left:
                self._wait_for(strand, each, journal, now, FAILURE if dies else failure)

    def _wait_for(self, strand: Cursor, piece: Range, journal: Journal, now: int, failure: NackOutcome) -> None:
        seconds = self.retry.wait(piece.attempt, self._chance(piece)) if failure.delay is None else failure.delay
        counted = failure.counted
        self._give_back(strand, piece, due_time(now, seconds), journal, counted=counted, now=now)

    def _hold(
        self, strand: Cursor, row: Range, lp: int, key: int, journal: Journal, now: int, failure: NackOutcome
    ) -> None:
        """A row of a strict subject failed: its key waits alone; without attempts it is parked."""
        if strand.key is None:
            if strand.hands is None:
                # Once for all of its keys that fail: each takes its own out of it.
                strand.knows(self._know(journal, strand))
            strand = self.strands.hold(strand, lp, key)
            waiting, strand.waiting = strand.waiting, DueRanges()
            for due, pieces in waiting:
                for piece in pieces:
                    for sequences, _ in self._rows(journal, strand, piece.start, piece.end):
                        for first, last in joined(sequences):
                            strand.waiting.add(first, last, piece.attempt, due)
        # What comes behind it is not handled before it, whoever has it.
        behind = [(tag, piece) for tag, held in strand.held.items() for piece in held.overlap(row.end, strand.next)]
        for tag, piece in behind:
            strand.let_go(tag, piece.start, piece.end)
            self._give_back(strand, piece, 0, journal, counted=False)
        dies = any(dies for _, dies in self._fates(row, failure, self._old_before(row, now)))
        if dies and not journal.bury(self, strand.id, [row], failure.reason):
            self._park(strand, row.start, journal)
            return
        self._wait_for(strand, row, journal, now, FAILURE if dies else failure)

    def refuse_more_keys(self, parked: Iterable[int]) -> None:
        """Raise where these keys are more than a group may have apart; nothing has changed then."""
        new = set(parked) - self.strands.by_key.keys()
        keys = len(self.strands.by_key) + len(new)
        if new and keys > self.limits.held_keys:
            raise LimitExceeded(
                f"group {self.name!r} of {self.partition.row.subject!r} would have {keys} keys apart, failed or "
                f"parked; the limit is {self.limits.held_keys} (held_keys); resume or skip some",
                limit="held_keys",
                value=self.limits.held_keys,
            )

    def inherit(self, parked: Iterable[int], resumed: Iterable[int], journal: Journal) -> None:
        """Keys that are parked where their rows were before are parked here; those that went on there go on."""
        known = self.strands.by_key
        for key in [key for key in parked if key not in known or not known[key].parked]:
            lp = key % LOGICAL_PARTITIONS
            strand = self.strands.for_row(lp, key)
            if strand.key is None:
                strand = self.strands.hold(strand, lp, key)
                strand.drop()
            self._park(strand, -1, journal)
        for key in resumed:
            if key in known and known[key].letter < 0:
                # One that has a letter here as well waits for somebody's decision about that.
                self.resume(key, journal, skip=True)

    def _park(self, strand: Cursor, letter: int, journal: Journal) -> None:
        strand.parked, strand.letter = True, letter
        journal.event(Action.PARK, self, strand.id, max(letter, 0), letter + 1, 0)

    def parked(self) -> list[Cursor]:
        """The keys that wait for somebody's decision."""
        return [strand for strand in self.strands.by_key.values() if strand.parked]

    def resume(self, key: int, journal: Journal, *, skip: bool) -> bool:
        """Go on with a parked key: with the message that failed, or behind it (``skip``). False: it is not parked."""
        strand = self.strands.by_key.get(key)
        if strand is None or not strand.parked:
            return False
        strand.parked = False
        journal.event(Action.RESUME, self, strand.id, 0, 0, 0)
        # Letters of the key that were skipped before stay what they are, and one that was purged is not there any more.
        if not skip and self.pull_log.dead.overlap(strand.letter, strand.letter + 1):
            journal.event(Action.REVIVE, self, strand.id, strand.letter, strand.letter + 1, 0)
            self._revive(strand, strand.letter, strand.letter + 1)
        return True

    def _revive(self, strand: Cursor, start: int, end: int) -> None:
        for first, last, attempt in self.pull_log.dead.remove(start, end):
            self.pull_log.resent.add(first, last, attempt)
            strand.given_back(first, last, attempt)

    def buried(self, strand: int, start: int, end: int, attempt: int, now: int) -> None:
        """[start, end) of a strand is out of attempts."""
        found = self.strands.get(strand)
        if found is not None:
            found.settled(start, end)
        self.pull_log.buried(0, start, end, attempt, now)

    def revived(self, start: int, end: int, journal: Journal) -> int:
        """What is dead in [start, end) is handed out again, in its strand; how many sequences."""
        pieces = self.pull_log.dead.overlap(start, end)
        for strand in list(self.strands):
            for piece in pieces:
                for sequences, _ in self._rows(journal, strand, piece.start, piece.end):
                    for first, last in joined(sequences):
                        journal.event(Action.REVIVE, self, strand.id, first, last, 0)
                        self._revive(strand, first, last)
        return count_of(pieces)

    @property
    def next_due(self) -> int | None:
        """When the next of what waits is due."""
        dues = [due for strand in self.strands if strand.waiting and (due := strand.waiting.next_due) is not None]
        return min(dues, default=None)

    def return_due(self, now: int) -> bool:
        """What has waited long enough may be handed out; whether there is anything."""
        ready = [strand for strand in self.strands if strand.waiting and strand.return_due(now)]
        return bool(ready)
