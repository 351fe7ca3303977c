"""Stores dead letters, and other messages that a group needs after retention removed them, in the retained log.

A dead letter is a message that its group does not deliver again. The group's ``Failures`` has its sequence; the
retained log has the message and the reason. A resend is one event: the group that failed the message, and no other
group, gets the same message again, with the same sequence and id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum, auto
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plait.broker.groups.group import Group
from plait.broker.groups.waking import wake_group
from plait.broker.turn import Turn
from plait.errors import FrameError
from plait.frame.view import FrameView
from plait.model.reason import Reason
from plait.storage.logs.action_events import Buried, Purged
from plait.storage.logs.retained_log import HISTORY_MAX, DeathRecord, Note, frame_at, note_of, retained_frames, rows_of
from plait.storage.ranges import Range, count_of, joined

#: Rows with equal keys share one note: attempts, second of the first failure, offset in the retained log (-1: none).
Key = tuple[int, int, int]
Sequences = npt.NDArray[np.int64]


class Choice(NamedTuple):
    """Selects dead letters: those that match all given fields."""

    sequences: list[int] | None = None
    #: The type of the exception, and the handler that raised it.
    type: str | None = None
    handler: str | None = None
    #: They became dead letters before this time, in microseconds.
    before: int | None = None

    def matches(self, death: DeathRecord | None) -> bool:
        """Whether all fields except the sequences match."""
        if self.type is None and self.handler is None and self.before is None:
            return True
        if death is None:
            return False
        return (
            (self.type is None or death.reason.type == self.type)
            and (self.handler is None or death.reason.handler == self.handler)
            and (self.before is None or death.last_time < self.before)
        )


class Letters(NamedTuple):
    """Dead letters in one frame of the retained log; ``frame`` and ``death`` are None if it cannot be read."""

    sequences: Sequences
    frame: FrameView | None
    death: DeathRecord | None


class RetainOutcome(Enum):
    """The outcome of copying rows to the retained log."""

    YES = auto()
    #: The rows cannot be read, or the group is at its limit.
    NO = auto()
    DISK_FULL = auto()


class DeadLetters:
    """All dead letters of a broker."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    # --- adding ---------------------------------------------------------------------------------

    def bury(self, group: Group, consumer: int, pieces: list[Range], reason: Reason) -> list[Range]:
        """Make dead letters of pieces that a consumer holds; returns the pieces for which there is no room or that are
        damaged.
        """
        now = self._turn.clock.now()
        rest: list[Range] = []
        for frame, rows in self._by_frame(group, pieces, now, rest):
            for (attempt, first, before), mask in rows.items():
                death = DeathRecord(attempt, first * 1_000_000, now, reason, self._history(before))
                sequences = frame.sequences()[mask]
                stored = self._retain(group, frame, mask, Note(group.id, death), again=before >= 0)
                for start, end in joined(sequences):
                    if stored is not RetainOutcome.YES:
                        rest.append(Range(start, end, attempt))
                        continue
                    self._turn.event(group, Buried(attempt, holder=consumer, start=start, end=end))
                    group.buried(consumer, start, end, attempt, now)
                    group.died_count += end - start
        return rest

    def retain(self, group: Group, pieces: list[Range]) -> list[Range] | None:
        """Copy messages that retention is about to remove; returns those that could not be copied.

        Returns None if the disk has no room at present.
        """
        rest: list[Range] = []
        for frame, rows in self._by_frame(group, pieces, 0, rest):
            for (attempt, _, before), mask in rows.items():
                copied = self._retain(group, frame, mask, Note(group.id)) if before < 0 else RetainOutcome.YES
                if copied is RetainOutcome.DISK_FULL:
                    return None
                if copied is RetainOutcome.NO:
                    rest += [Range(start, end, attempt) for start, end in joined(frame.sequences()[mask])]
        return rest

    def _by_frame(
        self, group: Group, pieces: list[Range], now: int, rest: list[Range]
    ) -> Iterator[tuple[FrameView, dict[Key, npt.NDArray[np.bool_]]]]:
        """The frames of the pieces, each with its rows by ``Key``. Adds pieces that cannot be read to ``rest``."""
        failing = group.failures.failing
        found: dict[tuple[int, int], tuple[FrameView, dict[Key, npt.NDArray[np.bool_]]]] = {}
        for start, end, attempt in sorted(pieces):
            while start < end:
                frame = group.frame_of(start)
                first, last = rows_of(frame, start, end) if frame is not None else (0, 0)
                if frame is None or first == last:
                    # It is damaged. The group skips it when it is due for delivery.
                    rest.append(Range(start, end, attempt))
                    break
                # ``base`` and ``crc`` identify a frame: the stamp and the selection determine them.
                _, rows = found.setdefault((frame.base, frame.crc), (frame, {}))
                begun = failing.overlap(start, start + last - first) if now else []
                for low, high, since in _filled(begun, start, start + last - first, now // 1_000_000):
                    for begin, stop, before in self._by_place(group, low, high):
                        key = (attempt, since, before)
                        mask = rows.setdefault(key, np.zeros(frame.count, bool))
                        mask[begin - start + first : stop - start + first] = True
                start += last - first
        yield from found.values()

    def _by_place(self, group: Group, start: int, end: int) -> list[tuple[int, int, int]]:
        """(start, end, offset) of the parts that are at one offset of the retained log; -1: not in it."""
        if not group.retained:
            return [(start, end, -1)]
        places = group.retained.places(range(start, end))
        edges = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), end - start]
        return [(start + a, start + b, int(places[a])) for a, b in pairwise(edges)]

    def _history(self, offset: int) -> list[DeathRecord]:
        """The earlier deaths of a letter that was resent, from its frame at ``offset``."""
        frame = frame_at(self._turn.retained_log, offset) if offset >= 0 else None
        death = _death(frame)
        if death is None:
            return []
        last = DeathRecord(death.attempts, death.first_time, death.last_time, death.reason)
        return [*death.history, last][-HISTORY_MAX:]

    def _retain(
        self, group: Group, frame: FrameView, mask: npt.NDArray[np.bool_], note: Note, *, again: bool = False
    ) -> RetainOutcome:
        """Copy rows to the retained log. ``again``: it already has them under another note."""
        turn = self._turn
        if not again and len(group.retained) + int(mask.sum()) > turn.limits.retained_messages:
            return RetainOutcome.NO
        places: list[tuple[Sequences, int]] = []
        try:
            for parts, sequences in retained_frames(frame, mask, note):
                places.append((sequences, turn.retained_log.append(parts.parts, parts.size)))
            # The rows may be read before the turn ends.
            turn.retained_log.write()
        except FrameError:
            return RetainOutcome.NO
        except OSError as error:
            turn.disk_error(error)
            return RetainOutcome.DISK_FULL
        for sequences, offset in places:
            group.retained.add(sequences, offset)
        turn.touch(group.partition)
        turn.answer_after_commit(None)
        return RetainOutcome.YES

    # --- finding --------------------------------------------------------------------------------

    def page(
        self, group: Group, choice: Choice, after: int, limit: int, look: int = 0
    ) -> tuple[list[Letters], int | None]:
        """The first ``limit`` matching dead letters after a sequence, and where the next page starts (None: no more).

        Examines at most ``look`` letters (at least ``limit``), so a page may have fewer than ``limit`` letters.
        """
        look = max(limit, look)
        dead = group.failures.dead
        if choice.sequences is None:
            ranges = dead.after(after + 1, look + 1)
            numbers = [np.arange(first, min(end, first + look + 1)) for first, end, _ in ranges]
            looked = np.concatenate([np.empty(0, np.int64), *numbers])
        else:
            looked = np.unique(np.array([s for s in choice.sequences if s > after], np.int64))
        following = int(looked[look - 1]) if len(looked) > look else None
        looked = looked[:look]
        if choice.sequences is not None:
            looked = looked[[bool(dead.overlap(s, s + 1)) for s in looked.tolist()]]
        found = list(self._letters(group, choice, looked))
        meant = np.sort(np.concatenate([np.empty(0, np.int64), *(letters.sequences for letters in found)]))
        if len(meant) > limit:
            following = int(meant[limit - 1])
            found = [letters._replace(sequences=letters.sequences[letters.sequences <= following]) for letters in found]
            found = [letters for letters in found if len(letters.sequences)]
        return found, following

    def _letters(self, group: Group, choice: Choice, sequences: Sequences) -> Iterator[Letters]:
        if not len(sequences):
            return
        places = group.retained.places(sequences.tolist())
        order = np.argsort(places, kind="stable")
        edges = np.flatnonzero(np.diff(places[order])) + 1
        for part in np.split(order, edges):
            offset = int(places[part[0]])
            frame = frame_at(self._turn.retained_log, offset) if offset >= 0 else None
            death = _death(frame)
            if choice.matches(death):
                yield Letters(sequences[part], frame if death is not None else None, death)

    # --- removing -------------------------------------------------------------------------------

    def resend(self, group: Group, letters: list[Letters]) -> int:
        """Deliver letters again, to their own group. Returns how many."""
        count = 0
        for found in letters:
            for start, end in joined(found.sequences):
                count += count_of(group.failures.dead.overlap(start, end))
                group.revived(start, end)
        wake_group(group)
        return count

    def purge(self, group: Group, letters: list[Letters]) -> int:
        """Delete letters. Returns how many."""
        count = 0
        for found in letters:
            for start, end in joined(found.sequences):
                self._turn.event(group, Purged(start, end))
                count += group.failures.purge(start, end)
        group.retained.settled()
        if len(group.retained) >= self._turn.limits.retained_messages:
            self.tidy(group)
        return count

    def expire(self, group: Group, before: int) -> int:
        """Delete letters that died before ``before`` (microseconds). Returns how many."""
        count = 0
        for offset, sequences in group.retained.by_offset(_pairs(group.failures.dead)):
            death = _death(frame_at(self._turn.retained_log, offset))
            if death is None:
                # It cannot be read, so its age is not known: only a purge or a resend removes it.
                continue
            if death.last_time >= before:
                # Letters are in the order in which they died.
                break
            count += self.purge(group, [Letters(sequences, None, death)])
        return count

    def tidy(self, group: Group) -> None:
        """Forget retained rows that the group no longer needs, which makes room for new ones."""
        # After a start from an older checkpoint a key may be behind the start of the partition again.
        group.mark_begun_below(group.partition.start)
        begun = group.begun(0, group.partition.visible)
        group.retained.tidy(_pairs([*begun, *group.failures.dead]))
        wake_group(group)


def _pairs(pieces: Iterable[Range]) -> npt.NDArray[np.int64]:
    """(start, end) of each piece, in ascending order."""
    pairs = np.array([(start, end) for start, end, _ in pieces], np.int64).reshape(-1, 2)
    return pairs[np.argsort(pairs[:, 0])]


def _death(frame: FrameView | None) -> DeathRecord | None:
    """The death record of a frame of the retained log; None: its rows are not dead, or the frame cannot be read."""
    if frame is None:
        return None
    try:
        return note_of(frame.verify()).death
    except FrameError:
        return None


def _filled(pieces: list[Range], start: int, end: int, default: int) -> Iterator[tuple[int, int, int]]:
    """[start, end) in parts: those of ``pieces``, and the gaps between them with ``default``."""
    for first, last, value in pieces:
        if start < first:
            yield start, first, default
        yield first, last, value
        start = last
    if start < end:
        yield start, end, default
