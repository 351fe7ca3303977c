"""The kept log: messages that a group still needs when the message log need not have them any more (R21).

A first-hand log of its own, with frames of rows cut out of the message log's, under the sequences, ids and times they
had there. A note beside the rows says which group needs them and, for dead letters, why. A frame whose rows are
all settled is of no use any more; a segment goes when none of its frames is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat

import msgspec
import numpy as np
import numpy.typing as npt

from plait.errors import DamageError, FrameError, TooLarge
from plait.frame.builder import FrameParts, build_frame
from plait.frame.header import pack_stamp
from plait.frame.slicing import keep_mask, read_note
from plait.frame.view import FrameView
from plait.model.reason import Reason
from plait.storage.logs.log import Log

DIRECTORY = "kept"
#: Deaths that a letter tells of, beside the last.
HISTORY_MAX = 10


class DeathRecord(msgspec.Struct, array_like=True, frozen=True):
    """Why messages are dead letters; times are microseconds since 1970."""

    attempts: int
    #: The first failure, and the last.
    first_time: int
    last_time: int
    reason: Reason
    #: Deaths before this one, the latest last: each was followed by a resend.
    history: list[DeathRecord] = []


class Note(msgspec.Struct, array_like=True, frozen=True):
    """What stands beside the rows of a kept frame."""

    #: The group that needs them.
    group: int
    #: None: they are to be tried again.
    death: DeathRecord | None = None


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Note)


def note_of(frame: FrameView) -> Note:
    """The note of a kept frame, or ``FrameError``."""
    try:
        return _decoder.decode(read_note(frame))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"the note of a kept frame does not decode: {error}") from None


def kept_frames(
    frame: FrameView, mask: npt.NDArray[np.bool_], note: Note
) -> list[tuple[FrameParts, npt.NDArray[np.int64]]]:
    """Frames for the kept log with the rows of ``frame`` where ``mask`` is true, and the sequences in each.

    Most often that is one; rows that were compressed may need several. ``FrameError``: it is damaged.
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
        halves += kept_frames(frame, half, note)
    return halves


def head_frame(time: int, durable: int, epoch: int, previous_end: int) -> FrameParts:
    """The first frame of a segment, which says where the one before ended (``Log.on_segment``)."""
    frame = build_frame([b"kept"], producer=0, first=1, previous=previous_end)
    frame.stamp_with(pack_stamp(0, 0, time, durable, epoch))
    return frame


def is_head(frame: FrameView) -> bool:
    """It holds no rows of anybody."""
    return frame.partition == 0


class RetainedRows:
    """Where the kept messages of a group are: sequence → offset in the kept log."""

    __slots__ = ("_offsets", "_untidy")

    def __init__(self) -> None:
        self._offsets: dict[int, int] = {}
        #: Some of them may be settled.
        self._untidy = False

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, sequences: npt.NDArray[np.int64], offset: int) -> None:
        """These are in the frame at ``offset``, wherever they were before."""
        self._offsets.update(dict.fromkeys(sequences.tolist(), offset))

    def offset(self, sequence: int) -> int | None:
        return self._offsets.get(sequence)

    def frame(self, log: Log, sequence: int) -> FrameView | None:
        """The frame that has a message; None: none does, or it cannot be read."""
        offset = self._offsets.get(sequence)
        if offset is None:
            return None
        return frame_at(log, offset)

    def places(self, sequences: Sequence[int]) -> npt.NDArray[np.int64]:
        """The offset of each; -1: it is not kept."""
        return np.fromiter(map(self._offsets.get, sequences, repeat(-1)), np.int64, len(sequences))

    def within(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """The sequences in [start, end) that are kept, ascending."""
        sequences = np.fromiter(self._offsets, np.int64, len(self._offsets))
        return np.sort(sequences[(sequences >= start) & (sequences < end)])

    def elsewhere_after(self, start: int, end: int) -> int:
        """The first of [start, end) that is kept, and in another frame than ``start`` is; ``end``: none is."""
        if not self._offsets:
            return end
        places = self.places(range(start, end))
        others = np.flatnonzero((places >= 0) & (places != places[0]))
        return start + int(others[0]) if len(others) else end

    def settled(self) -> None:
        """Some may be of no use any more."""
        self._untidy = True

    def tidy(self, needed: npt.NDArray[np.int64]) -> None:
        """Forget all but those within ``needed``: [start, end) pairs in ascending order, none overlapping."""
        if not self._untidy or not self._offsets:
            return
        self._untidy = False
        sequences, offsets = self._arrays()
        wanted = _within(sequences, needed)
        self._offsets = dict(zip(sequences[wanted].tolist(), offsets[wanted].tolist(), strict=True))

    @property
    def first_offset(self) -> int | None:
        """The kept log is needed from here on; None: not for these."""
        return min(self._offsets.values(), default=None)

    def by_offset(self, needed: npt.NDArray[np.int64]) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """(offset, sequences) of each frame with some of ``needed`` (as for ``tidy``), in the order of the log."""
        sequences, offsets = self._arrays()
        wanted = _within(sequences, needed)
        sequences, offsets = sequences[wanted], offsets[wanted]
        order = np.lexsort((sequences, offsets))
        sequences, offsets = sequences[order], offsets[order]
        edges = np.flatnonzero(np.diff(offsets, prepend=-1, append=-1)).tolist()
        return ((int(offsets[start]), sequences[start:end]) for start, end in pairwise(edges))

    def _arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        count = len(self._offsets)
        return np.fromiter(self._offsets, np.int64, count), np.fromiter(self._offsets.values(), np.int64, count)

    def dump(self) -> bytes:
        """For a checkpoint."""
        return np.concatenate(self._arrays()).astype("<i8").tobytes()

    @classmethod
    def load(cls, data: bytes) -> RetainedRows:
        """The state of a checkpoint."""
        kept = cls()
        numbers = np.frombuffer(data, "<i8").reshape(2, -1).tolist()
        kept._offsets = dict(zip(*numbers, strict=True))
        # Some may have been settled since anybody looked.
        kept._untidy = True
        return kept


def _within(sequences: npt.NDArray[np.int64], needed: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which of the sequences lie in one of the [start, end) pairs, which ascend."""
    if not len(needed):
        return np.zeros(len(sequences), bool)
    at = np.searchsorted(needed[:, 0], sequences, "right") - 1
    within: npt.NDArray[np.bool_] = (at >= 0) & (sequences < needed[at, 1])
    return within


def frame_at(log: Log, offset: int) -> FrameView | None:
    """The kept frame at an offset, not verified; None: there is none that can be read."""
    try:
        segment = log.segment_at(offset)
        frame = FrameView(segment.view, offset - segment.base)
        # Looked at by whoever asks for rows, which may be before anybody verifies.
        frame.selection()
    except (DamageError, FrameError):
        return None
    return None if is_head(frame) else frame


def rows_of(frame: FrameView, start: int, end: int) -> tuple[int, int]:
    """The rows of a frame with the sequences from ``start`` on, as far as they stand side by side; none: (0, 0)."""
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
