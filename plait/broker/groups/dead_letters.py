"""Dead letters, and whatever else a group needs beyond the message log: copied to the kept log, found there again.

A dead letter is a message in its place that is handed out no more: its group's ``PullLog`` says which, the kept log has
the message itself and why it died. So a resend is one event: the same message, under its own sequence and id, goes to
the group that failed it and to no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum, auto
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from plait.errors import FrameError
from plait.frame.view import FrameView
from plait.model.reason import Reason
from plait.storage.logs.action_log import Action
from plait.storage.logs.retained_log import HISTORY_MAX, DeathRecord, Note, frame_at, kept_frames, note_of, rows_of
from plait.storage.ranges import Range, joined

if TYPE_CHECKING:
    from plait.broker.broker import Broker
    from plait.broker.groups.shared_group import Group

#: What rows have to share to stand under one note: attempts, seconds of the first failure, where they were kept before.
Key = tuple[int, int, int]
Sequences = npt.NDArray[np.int64]


class Choice(NamedTuple):
    """Which dead letters are meant: all that match whatever is given."""

    sequences: list[int] | None = None
    #: The type of the exception, and the handler that raised it.
    type: str | None = None
    handler: str | None = None
    #: They died before this, in microseconds.
    before: int | None = None

    def takes(self, death: DeathRecord | None) -> bool:
        """All but the sequence fits."""
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
    """Dead letters that one frame of the kept log has; no frame and no death where it does not read back."""

    sequences: Sequences
    frame: FrameView | None
    death: DeathRecord | None


class RetainOutcome(Enum):
    """What became of rows that were to be kept."""

    YES = auto()
    #: They do not read back, or the group has as many as it may.
    NO = auto()
    DISK_FULL = auto()


class DeadLetters:
    """All dead letters of a broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    # --- putting in -----------------------------------------------------------------------------

    def bury(self, group: Group, consumer: int, pieces: list[Range], reason: Reason) -> list[Range]:
        """Make dead letters of what a consumer holds; what could not be, for lack of room or for damage."""
        now = self._broker.clock.now()
        rest: list[Range] = []
        for frame, rows in self._by_frame(group, pieces, now, rest):
            for (attempt, first, before), mask in rows.items():
                death = DeathRecord(attempt, first * 1_000_000, now, reason, self._history(before))
                sequences = frame.sequences()[mask]
                stored = self._keep(group, frame, mask, Note(group.id, death), again=before >= 0)
                for start, end in joined(sequences):
                    if stored is not RetainOutcome.YES:
                        rest.append(Range(start, end, attempt))
                        continue
                    self._broker.event(Action.BURY, group, consumer, start, end, attempt)
                    group.buried(consumer, start, end, attempt, now)
                    group.died_count += end - start
        return rest

    def keep(self, group: Group, pieces: list[Range]) -> list[Range] | None:
        """Copy messages that retention is about to take; what could not be. None: the disk has no room for it now."""
        rest: list[Range] = []
        for frame, rows in self._by_frame(group, pieces, 0, rest):
            for (attempt, _, before), mask in rows.items():
                copied = self._keep(group, frame, mask, Note(group.id)) if before < 0 else RetainOutcome.YES
                if copied is RetainOutcome.DISK_FULL:
                    return None
                if copied is RetainOutcome.NO:
                    rest += [Range(start, end, attempt) for start, end in joined(frame.sequences()[mask])]
        return rest

    def _by_frame(
        self, group: Group, pieces: list[Range], now: int, rest: list[Range]
    ) -> Iterator[tuple[FrameView, dict[Key, npt.NDArray[np.bool_]]]]:
        """The frames that have the pieces, and in each the rows that may stand under one note."""
        broker = self._broker
        failing = group.pull_log.failing
        found: dict[tuple[int, int], tuple[FrameView, dict[Key, npt.NDArray[np.bool_]]]] = {}
        for start, end, attempt in sorted(pieces):
            while start < end:
                frame = group.frame_of(broker.message_log, broker.kept_log, start)
                first, last = rows_of(frame, start, end) if frame is not None else (0, 0)
                if frame is None or first == last:
                    # It is damaged, and skipped when it would be handed out.
                    rest.append(Range(start, end, attempt))
                    break
                # A frame is told by where it stands in its log, which the stamp and the selection say.
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
        """(start, end, offset) of the parts that were kept in one place before; -1: nowhere."""
        if not group.kept:
            return [(start, end, -1)]
        places = group.kept.places(range(start, end))
        edges = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), end - start]
        return [(start + a, start + b, int(places[a])) for a, b in pairwise(edges)]

    def _history(self, offset: int) -> list[DeathRecord]:
        """What a letter that was resent tells of before."""
        frame = frame_at(self._broker.kept_log, offset) if offset >= 0 else None
        death = _death(frame)
        if death is None:
            return []
        last = DeathRecord(death.attempts, death.first_time, death.last_time, death.reason)
        return [*death.history, last][-HISTORY_MAX:]

    def _keep(
        self, group: Group, frame: FrameView, mask: npt.NDArray[np.bool_], note: Note, *, again: bool = False
    ) -> RetainOutcome:
        """Copy rows to the kept log; ``again``: they are there already, for another reason."""
        broker = self._broker
        if not again and len(group.kept) + int(mask.sum()) > broker.limits.kept_messages:
            return RetainOutcome.NO
        places: list[tuple[Sequences, int]] = []
        try:
            for parts, sequences in kept_frames(frame, mask, note):
                places.append((sequences, broker.kept_log.append(parts.parts, parts.size)))
            # It may be looked for before the turn ends.
            broker.kept_log.write()
        except FrameError:
            return RetainOutcome.NO
        except OSError as error:
            broker.disk_error(error)
            return RetainOutcome.DISK_FULL
        for sequences, offset in places:
            group.kept.add(sequences, offset)
        broker.touch(group.partition)
        broker.answer_after_commit(None)
        return RetainOutcome.YES

    # --- finding --------------------------------------------------------------------------------

    def page(
        self, group: Group, choice: Choice, after: int, limit: int, look: int = 0
    ) -> tuple[list[Letters], int | None]:
        """The first ``limit`` dead letters after a sequence that are meant; where to go on, None: there are no more.

        At most ``look`` are looked at (``limit`` at least): where few of them are meant it may be fewer.
        """
        look = max(limit, look)
        dead = group.pull_log.dead
        if choice.sequences is None:
            ranges = dead.after(after + 1, look + 1)
            looked = np.concatenate([np.empty(0, np.int64), *(_numbers(r, look + 1) for r in ranges)])
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
        places = group.kept.places(sequences.tolist())
        order = np.argsort(places, kind="stable")
        edges = np.flatnonzero(np.diff(places[order])) + 1
        for part in np.split(order, edges):
            offset = int(places[part[0]])
            frame = frame_at(self._broker.kept_log, offset) if offset >= 0 else None
            death = _death(frame)
            if choice.takes(death):
                yield Letters(sequences[part], frame if death is not None else None, death)

    # --- taking out -----------------------------------------------------------------------------

    def resend(self, group: Group, letters: list[Letters]) -> int:
        """Hand them out again, to their own group; how many."""
        count = 0
        for found in letters:
            for start, end in joined(found.sequences):
                count += group.revived(start, end, self._broker)
        self._broker.wake_group(group)
        return count

    def purge(self, group: Group, letters: list[Letters]) -> int:
        """Forget them; how many."""
        count = 0
        for found in letters:
            for start, end in joined(found.sequences):
                self._broker.event(Action.PURGE, group, 0, start, end, 0)
                count += group.pull_log.purged(start, end)
        group.kept.settled()
        if len(group.kept) >= self._broker.limits.kept_messages:
            self.tidy(group)
        return count

    def expire(self, group: Group, before: int) -> int:
        """Forget those that died earlier; how many."""
        count = 0
        for offset, sequences in group.kept.by_offset(_pairs(group.pull_log.dead)):
            death = _death(frame_at(self._broker.kept_log, offset))
            if death is None:
                # It does not read back, so how old it is is not known: somebody has to say what becomes of it.
                continue
            if death.last_time >= before:
                # They stand in the order in which they died.
                break
            count += self.purge(group, [Letters(sequences, None, death)])
        return count

    def tidy(self, group: Group) -> None:
        """Forget where those are kept that nobody needs any more; there may be room for new messages then."""
        begun = group.begun(0, group.partition.visible, self._broker)
        group.kept.tidy(_pairs([*begun, *group.pull_log.dead]))
        self._broker.wake_group(group)


def _pairs(pieces: Iterable[Range]) -> npt.NDArray[np.int64]:
    """[start, end) of each, in ascending order."""
    pairs = np.array([(start, end) for start, end, _ in pieces], np.int64).reshape(-1, 2)
    return pairs[np.argsort(pairs[:, 0])]


def _death(frame: FrameView | None) -> DeathRecord | None:
    """Why the messages of a kept frame died; None: they are to be tried again, or it does not read back."""
    if frame is None:
        return None
    try:
        return note_of(frame.verify()).death
    except FrameError:
        return None


def _numbers(piece: Range, limit: int) -> Sequences:
    return np.arange(piece.start, min(piece.end, piece.start + limit))


def _filled(pieces: list[Range], start: int, end: int, usual: int) -> Iterator[tuple[int, int, int]]:
    """[start, end) in parts: those of ``pieces``, and with ``usual`` what is between."""
    for first, last, value in pieces:
        if start < first:
            yield start, first, usual
        yield first, last, value
        start = last
    if start < end:
        yield start, end, usual
