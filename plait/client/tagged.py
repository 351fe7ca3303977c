"""What an ordered consumer says to a broker: runs of rows, by the tags of the frames that they came in.

In a strict group a row that fails takes along the rows of its key behind it: whatever was said of them, they are given
back, and come again after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from plait.client.delivered import Delivered
from plait.client.ordered_delivered import OrderedDelivered, RowMask, mask_of, rows_of
from plait.client.pending import merged
from plait.client.words import UNBEGUN, EpochRange, Failed, Nacks
from plait.frame.lp import Hashes
from plait.wire import messages as m

#: Tag → ranges.
_Tagged = dict[int, list[EpochRange]]
#: A frame, and the runs of its rows that were acked and that failed.
_Said = tuple[OrderedDelivered, list[EpochRange], Nacks]


class Failing:
    """The first row of each of some keys that failed."""

    def __init__(self, keys: Hashes, sequences: npt.NDArray[np.int64]) -> None:
        order = np.lexsort((sequences, keys))
        self._keys, first = np.unique(keys[order], return_index=True)
        self._sequences = sequences[order][first]
        #: Pulls from this number on were asked for after the broker knew; None: it may not know yet.
        self.known_to: int | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def behind(self, frame: OrderedDelivered) -> RowMask | None:
        """The frame's rows of these keys that come after the ones that failed; None: there are none."""
        if frame.keys is None or frame.keyed is None or not len(self):
            return None
        at = np.minimum(np.searchsorted(self._keys, frame.keys), len(self) - 1)
        mask = (self._keys[at] == frame.keys) & frame.keyed
        mask &= frame.sequences > self._sequences[at]
        return mask if mask.any() else None

    def came_again(self, frame: OrderedDelivered) -> None:
        """Keys whose failed row is in the frame are in order again."""
        if frame.keys is None or not len(self):
            return
        at = np.minimum(np.searchsorted(self._keys, frame.keys), len(self) - 1)
        again = at[(self._keys[at] == frame.keys) & (frame.sequences == self._sequences[at])]
        self._keys, self._sequences = np.delete(self._keys, again), np.delete(self._sequences, again)


class TaggedPending:
    """See the module. ``open_frames`` are those with rows in the client's hands, ``pulls`` counts its pulls."""

    def __init__(self, open_frames: Callable[[], Iterable[Delivered]], pulls: Callable[[], int]) -> None:
        self._open_frames = open_frames
        self._pulls = pulls
        #: A failed row holds its key.
        self.strict = False
        self._acks: _Tagged = {}
        self._nacks: dict[Failed, _Tagged] = {}
        #: The frames of the tags in there.
        self._frames: dict[int, OrderedDelivered] = {}
        #: What failed and may not be known to the broker: rows behind it that come meanwhile are not to be handled.
        self.failing: list[Failing] = []
        #: Those of them that this says.
        self._saying: list[Failing] = []

    # --- from the frames ------------------------------------------------------------------------

    def collect(self, frames: Iterable[Delivered]) -> None:
        said: list[_Said] = [(d, *d.collect()) for d in frames if isinstance(d, OrderedDelivered)]
        if self.strict and any(nacks for _, _, nacks in said):
            said = self._hold_keys(said)
        for frame, acks, nacks in said:
            self._put(frame, self._acks, acks)
            for failed, runs in nacks.items():
                self._put(frame, self._nacks.setdefault(failed, {}), runs)

    def _put(self, frame: OrderedDelivered, place: _Tagged, runs: list[EpochRange]) -> None:
        if not runs:
            return
        if frame.tag:
            self._frames[frame.tag] = frame
            place.setdefault(frame.tag, []).extend(frame.tagged(runs))
        else:
            place.setdefault(0, []).extend(frame.plain(rows_of(runs)))

    def _hold_keys(self, said: list[_Said]) -> list[_Said]:
        """The same without what stands behind a failed row of its key, which is given back."""
        keys, sequences = [], []
        for frame, _, nacks in said:
            if frame.keys is not None and frame.keyed is not None and nacks:
                rows = np.concatenate([rows_of(runs) for runs in nacks.values()])
                rows = rows[frame.keyed[rows]]
                keys.append(frame.keys[rows])
                sequences.append(frame.sequences[rows])
        if not sum(map(len, keys)):
            return said
        failing = Failing(np.concatenate(keys), np.concatenate(sequences))
        self.failing.append(failing)
        held = [_without(failing, *words) for words in said]
        for delivered in list(self._open_frames()):
            assert isinstance(delivered, OrderedDelivered)
            behind = failing.behind(delivered)
            if behind is not None:
                held.append((delivered, [], {UNBEGUN: delivered.close_rows(behind)}))
        return held

    def add(self, acks: list[EpochRange], nacks: Nacks) -> None:
        if acks:
            self._acks.setdefault(0, []).extend(acks)
        for failed, ranges in nacks.items():
            self._nacks.setdefault(failed, {}).setdefault(0, []).extend(ranges)

    # --- to the broker --------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._acks or self._nacks)

    def clear(self) -> None:
        self._acks, self._nacks, self._frames = {}, {}, {}

    def take(self) -> TaggedPending:
        taken = TaggedPending(self._open_frames, self._pulls)
        taken._acks, taken._nacks, taken._frames = self._acks, self._nacks, self._frames
        taken._saying = [failing for failing in self.failing if failing.known_to is None]
        self.clear()
        return taken

    def give_back(self, unsaid: TaggedPending) -> None:
        later, self._acks = self._acks, unsaid._acks
        _join(self._acks, later)
        for failed, tagged in unsaid._nacks.items():
            _join(self._nacks.setdefault(failed, {}), tagged)
        self._frames |= unsaid._frames

    def plain(self) -> tuple[list[EpochRange], Nacks]:
        return self._plain(self._acks), {failed: self._plain(tagged) for failed, tagged in self._nacks.items()}

    def _plain(self, tagged: _Tagged) -> list[EpochRange]:
        ranges: list[EpochRange] = []
        for tag, several in tagged.items():
            if not tag:
                ranges += several
                continue
            frame = self._frames[tag]
            for start, end, _ in several:
                first, last = np.searchsorted(frame.sequences, [start, end]).tolist()
                ranges += frame.plain(np.arange(first, last))
        return ranges

    def new_session(self) -> None:
        acks, nacks = self.plain()
        self.clear()
        self.add(acks, nacks)

    def ack(self, session: int) -> m.Ack | None:
        if not self._acks:
            return None
        return m.Ack(session, *_flat(self._acks))

    def failures(self) -> list[Failed]:
        return list(self._nacks)

    def nack(self, session: int, failed: Failed) -> m.Nack:
        ranges, tags = _flat(self._nacks[failed])
        return m.Nack(session, ranges, *failed, tags=tags)

    def told(self, failed: Failed) -> None:
        del self._nacks[failed]
        if not self._nacks:
            for failing in self._saying:
                failing.known_to = self._pulls()


def _without(failing: Failing, frame: OrderedDelivered, acks: list[EpochRange], nacks: Nacks) -> _Said:
    """What was said of a frame's rows; of those behind a failed one it is that they are given back."""
    behind = failing.behind(frame)
    if behind is None:
        return frame, acks, nacks
    kept: Nacks = {}
    back = np.zeros(frame.count, bool)
    for failed, runs in (None, acks), *nacks.items():
        mask = mask_of(rows_of(runs), frame.count)
        back |= mask & behind
        if failed is None:
            acks = frame.runs(mask & ~behind)
        else:
            kept[failed] = frame.runs(mask & ~behind)
    kept[UNBEGUN] = frame.runs(mask_of(rows_of(kept.get(UNBEGUN, [])), frame.count) | back)
    return frame, acks, {failed: runs for failed, runs in kept.items() if runs}


def _join(into: _Tagged, more: _Tagged) -> None:
    for tag, ranges in more.items():
        into.setdefault(tag, []).extend(ranges)


def _flat(tagged: _Tagged) -> tuple[list[EpochRange], list[int]]:
    """Ranges, and the tag of each."""
    ranges: list[EpochRange] = []
    tags: list[int] = []
    for tag, several in tagged.items():
        joined = merged(several)
        ranges += joined
        tags += [tag] * len(joined)
    return ranges, tags
