"""The retained log: messages that a group still needs after retention removed them from the message log (R21).

A first-hand log. Its frames are copies of rows of the message log, with the same sequences, ids and times. A note in
each frame names the group that needs the rows and, for dead letters, the reason. A frame is no longer needed once the
group needs none of its rows; a segment is removed once none of its frames is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat

import msgspec
import numpy as np
import numpy.typing as npt

from plait.errors import DamageError, FrameError, TooLarge
from plait.frame.builder import FrameParts, build_frame, pack_stamp
from plait.frame.slicing import keep_mask, read_note
from plait.frame.view import FrameView
from plait.model.reason import Reason
from plait.storage.logs.log import Log

DIRECTORY = "retained"
#: Earlier deaths that a dead letter records, in addition to the last one.
HISTORY_MAX = 10


class DeathRecord(msgspec.Struct, array_like=True, frozen=True):
    """Why messages are dead letters; times are microseconds since 1970."""

    attempts: int
    #: The times of the first and of the last failure.
    first_time: int
    last_time: int
    reason: Reason
    #: Earlier deaths, the latest last: each was followed by a resend.
    history: list[DeathRecord] = []


class Note(msgspec.Struct, array_like=True, frozen=True):
    """The note in a frame of the retained log."""

    #: The id of the group that needs the rows.
    group: int
    #: None: the rows wait for a retry.
    death: DeathRecord | None = None


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Note)


def note_of(frame: FrameView) -> Note:
    """The note of a retained frame; ``FrameError`` if it does not decode."""
    try:
        return _decoder.decode(read_note(frame))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"the note of a retained frame does not decode: {error}") from None


def retained_frames(
    frame: FrameView, mask: npt.NDArray[np.bool_], note: Note
) -> list[tuple[FrameParts, npt.NDArray[np.int64]]]:
    """Frames for the retained log with the rows of ``frame`` where ``mask`` is true, and the sequences in each.

    Usually one frame; rows that were compressed may need several. ``FrameError`` if ``frame`` is damaged.
    """
    try:
        return [(keep_mask(frame, mask, _encode(note)), frame.sequences()[mask])]
    except TooLarge:
        rows = np.flatnonzero(mask)
        if len(rows) == 1:
            raise
    halves = []
    for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        half = np.zeros(len(mask), bool)
        half[part] = True
        halves += retained_frames(frame, half, note)
    return halves


def header_frame(time: int, durable: int, epoch: int, previous_end: int) -> FrameParts:
    """The header of a segment, which names the end of the segment before (``Log.on_segment``)."""
    frame = build_frame([b"retained"], producer=0, first=1, previous=previous_end)
    frame.stamp_with(pack_stamp(0, 0, time, durable, epoch))
    return frame


def is_header(frame: FrameView) -> bool:
    """True for a segment header, which has no rows of a group."""
    return frame.partition == 0


class RetainedRows:
    """The retained messages of a group: sequence → offset in the retained log."""

    __slots__ = ("_untidy", "offsets")

    def __init__(self) -> None:
        #: Sequence → offset in the retained log.
        self.offsets: dict[int, int] = {}
        #: True if the group may no longer need some of the sequences.
        self._untidy = False

    def __len__(self) -> int:
        return len(self.offsets)

    def add(self, sequences: npt.NDArray[np.int64], offset: int) -> None:
        """Record that these sequences are in the frame at ``offset``; earlier copies are forgotten."""
        self.offsets.update(dict.fromkeys(sequences.tolist(), offset))

    def frame(self, log: Log, sequence: int) -> FrameView | None:
        """The frame with a message; None if it is not retained, or its frame is unreadable."""
        offset = self.offsets.get(sequence)
        return None if offset is None else frame_at(log, offset)

    def places(self, sequences: Sequence[int]) -> npt.NDArray[np.int64]:
        """The offset of each sequence; -1 if it is not retained."""
        return np.fromiter(map(self.offsets.get, sequences, repeat(-1)), np.int64, len(sequences))

    def within(self, start: int, end: int) -> npt.NDArray[np.int64]:
        sequences = np.fromiter(self.offsets, np.int64, len(self.offsets))
        return np.sort(sequences[(sequences >= start) & (sequences < end)])

    def elsewhere_after(self, start: int, end: int) -> int:
        """The first retained sequence in [start, end) that is not in the frame of ``start``; ``end`` if none is."""
        if not self.offsets:
            return end
        places = self.places(range(start, end))
        others = np.flatnonzero((places >= 0) & (places != places[0]))
        return start + int(others[0]) if len(others) else end

    def settled(self) -> None:
        """Note that the group may no longer need some sequences, so that the next ``tidy`` checks them."""
        self._untidy = True

    def tidy(self, needed: npt.NDArray[np.int64]) -> None:
        """Forget all sequences outside ``needed``: [start, end) pairs, ascending and disjoint."""
        if not self._untidy or not self.offsets:
            return
        self._untidy = False
        sequences, offsets = self._arrays()
        wanted = _within(sequences, needed)
        self.offsets = dict(zip(sequences[wanted].tolist(), offsets[wanted].tolist(), strict=True))

    def by_offset(self, needed: npt.NDArray[np.int64]) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """(offset, sequences) of each frame with rows in ``needed`` (as for ``tidy``), in log order."""
        sequences, offsets = self._arrays()
        wanted = _within(sequences, needed)
        sequences, offsets = sequences[wanted], offsets[wanted]
        order = np.lexsort((sequences, offsets))
        sequences, offsets = sequences[order], offsets[order]
        edges = np.flatnonzero(np.diff(offsets, prepend=-1, append=-1)).tolist()
        return ((int(offsets[start]), sequences[start:end]) for start, end in pairwise(edges))

    def _arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        count = len(self.offsets)
        return np.fromiter(self.offsets, np.int64, count), np.fromiter(self.offsets.values(), np.int64, count)

    def dump(self) -> bytes:
        return np.concatenate(self._arrays()).astype("<i8").tobytes()

    @classmethod
    def load(cls, data: bytes) -> RetainedRows:
        """Restore the state from a checkpoint."""
        rows = cls()
        numbers = np.frombuffer(data, "<i8").reshape(2, -1).tolist()
        rows.offsets = dict(zip(*numbers, strict=True))
        # The group may have stopped needing some sequences after the last ``tidy``.
        rows._untidy = True
        return rows


def _within(sequences: npt.NDArray[np.int64], needed: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which of the sequences lie in one of the ascending [start, end) pairs."""
    if not len(needed):
        return np.zeros(len(sequences), bool)
    at = np.searchsorted(needed[:, 0], sequences, "right") - 1
    within: npt.NDArray[np.bool_] = (at >= 0) & (sequences < needed[at, 1])
    return within


def frame_at(log: Log, offset: int) -> FrameView | None:
    """The retained frame at an offset, not verified; None if there is no readable one."""
    try:
        segment = log.segment_at(offset)
        frame = FrameView(segment.view, offset - segment.base)
        # Decoded here, because callers use the selection before they verify the frame.
        frame.selection()
    except (DamageError, FrameError):
        return None
    return None if is_header(frame) else frame


def rows_of(frame: FrameView, start: int, end: int) -> tuple[int, int]:
    """The row indexes [first, last) of consecutive sequences from ``start``, below ``end``; (0, 0): none."""
    selection = frame.selection()
    if selection is None:
        first, last = max(start - frame.base, 0), min(end - frame.base, frame.count)
        return (first, last) if first + frame.base == start and first < last else (0, 0)
    rows = selection.rows
    first, last = np.searchsorted(rows, [start - frame.base, end - frame.base]).tolist()
    if first == last or rows[first] != start - frame.base:
        return 0, 0
    gaps = np.flatnonzero(np.diff(rows[first:last]) != 1)
    return first, first + int(gaps[0]) + 1 if len(gaps) else last
