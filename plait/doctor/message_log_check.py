"""Checks the message log: the checksums of every frame, and that the sequences of every partition have no gap."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from plait.broker.recovery.shards import PartitionState
from plait.doctor.consume_log_check import ConsumeCheck
from plait.doctor.findings import CheckReport
from plait.doctor.log_checks import RESTORE, LogCheck
from plait.doctor.log_walk import Walk
from plait.errors import FrameError
from plait.frame.view import FrameView
from plait.model.names import counted
from plait.storage.catalog import CATALOG, read_rows

#: Subjects that one finding names. More are only counted.
NAMED_MAX = 3


class SequenceGap(NamedTuple):
    """Sequences [start, end) of a partition are missing. Their frames were at offsets [after, before) of the log."""

    partition: int
    start: int
    end: int
    after: int
    before: int


class MessageCheck(LogCheck):
    """One walk over the message log."""

    part = "message log"

    def __init__(
        self, walk: Walk, partitions: dict[int, PartitionState], consume: ConsumeCheck, report: CheckReport
    ) -> None:
        super().__init__(walk, report)
        self._states = partitions
        self._consume = consume
        self._subjects = {entry.row.id: entry.row.subject for entry in partitions.values()}
        #: The newest catalog row of each partition, from the checkpoint or the log.
        self.catalog = {entry.row.id: entry.row for entry in partitions.values()}
        #: Partitions that were deleted according to the log: their messages are not missing.
        self._deleted: set[int] = set()
        self._next: dict[int, int] = {}
        self._last_end: dict[int, int] = {}
        self._epoch = 1
        self._gaps: list[SequenceGap] = []
        self._unknown_frames = 0
        walk.plausible = self._plausible

    def run(self) -> None:
        for offset, frame in self._walk.frames():
            self._epoch = max(self._epoch, frame.epoch)
            if frame.partition == CATALOG:
                self._catalog(offset, frame)
                continue
            self._walk.facts.rows += frame.count
            self._consume.frame(offset, frame)
            self._sequence(offset, frame)
        self._find_lost_ends()
        # The schedule partition of a subject has the same subject name.
        self._report.subjects = len(set(self._subjects.values()))
        self._gaps = [gap for gap in self._gaps if gap.partition not in self._deleted]
        self._report.missing_messages = sum(gap.end - gap.start for gap in self._gaps)
        self._add_findings()

    # --- frames ---------------------------------------------------------------------------------

    def _plausible(self, offset: int, frame: FrameView) -> bool:
        """Whether a frame found after damage is a frame of the log, not bytes inside a message body."""
        if frame.durable > offset or frame.epoch < self._epoch:
            return False
        if frame.partition == CATALOG:
            return frame.producer == 0
        return frame.partition in self._subjects and frame.base >= self._next.get(frame.partition, 0)

    def _catalog(self, offset: int, frame: FrameView) -> None:
        try:
            rows = read_rows(frame)
        except (FrameError, msgspec.MsgspecError) as error:
            what, harm = f"a catalog frame does not decode: {error}", "the subjects it defines are not known"
            advice = "use the version of Plait that wrote it, or restore this file from a copy"
            self._add("damaged", offset, frame.size, what, advice, harm)
            return
        for row in rows:
            self.catalog[row.id] = row
            if row.deleted:
                self._deleted.add(row.id)
                self._subjects.pop(row.id, None)
            else:
                self._subjects[row.id] = row.subject

    def _sequence(self, offset: int, frame: FrameView) -> None:
        partition = frame.partition
        if partition not in self._subjects and partition not in self._deleted:
            self._unknown_frames += 1
        expected = self._next.get(partition)
        if expected is None:
            expected = min(self._first_expected(partition, frame.base), frame.base)
        if frame.base > expected:
            after = self._last_end.get(partition, self._walk.start)
            self._gaps.append(SequenceGap(partition, expected, frame.base, after, offset))
        self._next[partition] = max(frame.base + frame.count, expected)
        self._last_end[partition] = offset + frame.size

    def _first_expected(self, partition: int, found: int) -> int:
        """The first sequence that must exist. ``found`` where retention may have removed earlier ones."""
        floor = self._walk.start if self._walk.floor is None else self._walk.floor
        state = self._states.get(partition)
        if self._walk.start > floor or floor == 0:
            return state.start if state is not None else found if floor else 0
        return found

    def _find_lost_ends(self) -> None:
        """Find sequences that the checkpoint has and the log lacks at its end."""
        for partition, state in self._states.items():
            found = self._next.get(partition, state.start)
            if found < state.next:
                after = self._last_end.get(partition, self._walk.start)
                self._gaps.append(SequenceGap(partition, found, state.next, after, max(self._walk.end, after + 1)))

    # --- findings -------------------------------------------------------------------------------

    def _add_findings(self) -> None:
        reported: set[SequenceGap] = set()
        for damage in self._walk.damages:
            if damage.kind == "torn":
                harm = "none: it was not durable when the server stopped"
                advice = "nothing: the next start saves a copy in quarantine/ and removes it"
                self._add("note", damage.offset, damage.size, f"a torn tail: {damage.reason}", advice, harm)
                continue
            lost = [gap for gap in self._gaps if gap.after < damage.offset + damage.size and damage.offset < gap.before]
            reported.update(lost)
            advice = RESTORE + "these bytes"
            self._add("damaged", damage.offset, damage.size, damage.reason, advice, self._harm(lost))
        other_times = "look for log files that were removed or restored from different times"
        for gap in self._gaps:
            if gap not in reported:
                offset = gap.before if gap.before < self._walk.end else gap.after
                what = "sequences are missing between intact frames"
                self._add("damaged", offset, None, what, other_times, self._harm([gap]))
        if self._unknown_frames:
            frames = counted(self._unknown_frames, "frame")
            what = f"{frames} of partitions that neither log nor checkpoint define"
            harm = "their messages cannot be read"
            self._report.add("damaged", self.part, f"{self._walk.directory}/", what, harm, other_times)

    def _harm(self, lost: list[SequenceGap]) -> str:
        if not lost:
            return "no message is known to be lost: the bytes held none, or none of an existing subject"
        parts = [
            f"{self._subjects.get(gap.partition, f'partition {gap.partition}')}: "
            f"{counted(gap.end - gap.start, 'message')}, sequences {gap.start} to {gap.end - 1}"
            for gap in lost[:NAMED_MAX]
        ]
        more = f" and {len(lost) - NAMED_MAX} more places" if len(lost) > NAMED_MAX else ""
        return f"cannot be read: {'; '.join(parts)}{more}"
