"""Plans which rows of an outbox become which frames, and keeps the frames that are assigned and not stored yet.

The order per key is the order in which rows are planned, and depends on three rules. Frames of a partition are sent one
after another, each after its predecessor is stored. Rows of an LP are assigned to a partition only while no frame of
another partition has rows of that LP; so when a route changes, an LP moves after its earlier rows are stored. When a
partition no longer accepts an LP, all of the partition's frames are withdrawn: the next turn makes their rows
unassigned again, before it assigns any other. Otherwise the partition could store a later frame first, and take a frame
that it has never stored, with lower numbers, for one that it has forgotten.

Plain objects: no database, no connection, no clock.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from plait.client.send.numbered_sender import SendTarget
from plait.client.types import PartitionName
from plait.frame.builder import FrameParts
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import edges
from plait.outbox.outbox_limits import (
    OUTBOX_FRAME_BYTES,
    OUTBOX_FRAME_ROWS,
    OUTBOX_PARTIAL_RANGES,
    OUTBOX_PARTIAL_SUBJECTS,
    OUTBOX_QUEUE_FRAMES,
    OUTBOX_TURN_BYTES,
    OUTBOX_TURN_ROWS,
)


class RouteTable(Protocol):
    """What a plan needs of a ``SubjectRoute``."""

    partitions: list[PartitionName]
    table: npt.NDArray[np.int64]

    def writable(self, group: str, /) -> bool:
        """Whether a broker group accepts sends."""
        ...


class WaitingRow(NamedTuple):
    """A row without its message."""

    id: int
    subject: str
    lp: int | None
    size: int
    delayed: bool


class PlannedFrame(msgspec.Struct, eq=False):
    """Rows that are to be assigned to a partition."""

    subject: str
    target: SendTarget
    rows: list[WaitingRow] = []
    size: int = 0


class OutboxFrame(msgspec.Struct, eq=False):
    """Rows with sequences, which the database has saved."""

    target: SendTarget
    waiting: list[WaitingRow]
    parts: FrameParts
    #: True if the frame may be stored: an attempt had no result, or a former leader may have sent it.
    doubt: bool = False

    @property
    def subject(self) -> str:
        """The subject of all rows."""
        return self.waiting[0].subject


class Exclusion(NamedTuple):
    """Rows of a subject that cannot be planned at present: LPs [first, end), and rows without a key."""

    subject: str
    runs: list[tuple[int, int]]
    keyless: bool


class FrameQueues:
    """The frames that one leader has assigned."""

    def __init__(self) -> None:
        #: The frames of each partition in order. The first one is being sent.
        self._queues: dict[SendTarget, deque[OutboxFrame]] = {}
        #: Partitions whose first frame could not be sent; they get no more frames.
        self.failing: set[SendTarget] = set()
        #: Withdrawn frames that no turn has recorded yet.
        self._withdrawn: list[OutboxFrame] = []
        self._turn = 0

    def add(self, frames: Iterable[OutboxFrame]) -> None:
        """Queue frames that were assigned.

        A frame of a partition whose earlier frames were withdrawn meanwhile is withdrawn as well.
        """
        refused = {frame.target for frame in self._withdrawn}
        for frame in frames:
            if frame.target in refused:
                self._withdrawn.append(frame)
            else:
                self._queues.setdefault(frame.target, deque()).append(frame)

    def targets(self) -> list[SendTarget]:
        """The partitions that have frames."""
        return list(self._queues)

    def head(self, target: SendTarget) -> OutboxFrame | None:
        """The frame of a partition that is to be sent now."""
        queue = self._queues.get(target)
        return queue[0] if queue else None

    def stored(self, target: SendTarget) -> OutboxFrame:
        """Remove the first frame of a partition, which the broker has stored."""
        queue = self._queues[target]
        frame = queue.popleft()
        if not queue:
            del self._queues[target]
        self.failing.discard(target)
        return frame

    def withdraw(self, target: SendTarget) -> None:
        """Remove all frames of a partition; their rows are to be planned again."""
        self.failing.discard(target)
        self._withdrawn.extend(self._queues.pop(target))

    def take_withdrawn(self) -> list[int]:
        """The ids of the rows that the next turn is to make unassigned, immediately after a plan."""
        ids = [row.id for frame in self._withdrawn for row in frame.waiting]
        self._withdrawn.clear()
        return ids

    # --- planning -------------------------------------------------------------------------------

    def plan(self, waiting: Sequence[WaitingRow], routes: Mapping[str, RouteTable]) -> list[PlannedFrame]:
        """The frames to assign now. ``waiting`` is in the order of the ids."""
        homes = self._homes()
        keyless = {
            subject: self._keyless(routes.get(subject)) for subject in dict.fromkeys(row.subject for row in waiting)
        }
        # Rows of withdrawn frames are found again after the turn that records them; later rows of their LPs wait.
        held = {(row.subject, row.lp) for frame in self._withdrawn for row in frame.waiting if row.lp is not None}
        opened: dict[SendTarget, PlannedFrame] = {}
        counts: dict[SendTarget, int] = {}
        planned: list[PlannedFrame] = []
        size = count = 0
        for row in waiting:
            route = routes.get(row.subject)
            if route is None:
                continue
            if row.lp is None:
                home = keyless[row.subject]
            else:
                place = row.subject, row.lp
                home = None if place in held else route.partitions[int(route.table[row.lp])]
                if homes.get(place, home) != home:
                    home = None
            target = None if home is None else (home, row.delayed)
            frame = None if target is None else opened.get(target)
            if target is not None and (
                frame is None or len(frame.rows) >= OUTBOX_FRAME_ROWS or frame.size + row.size > OUTBOX_FRAME_BYTES
            ):
                if self._full(target, counts.get(target, 0)):
                    target = None
                else:
                    counts[target] = counts.get(target, 0) + 1
                    frame = opened[target] = PlannedFrame(row.subject, target)
                    planned.append(frame)
            if target is None or frame is None:
                if row.lp is not None:
                    held.add((row.subject, row.lp))
                continue
            frame.rows.append(row)
            frame.size += row.size
            size += row.size
            count += 1
            if size >= OUTBOX_TURN_BYTES or count >= OUTBOX_TURN_ROWS:
                break
        return [frame for frame in planned if frame.rows]

    def _full(self, target: SendTarget, more: int = 0) -> bool:
        return target in self.failing or len(self._queues.get(target, ())) + more >= OUTBOX_QUEUE_FRAMES

    def _homes(self) -> dict[tuple[str, int], PartitionName]:
        """Subject and LP → the partition that frames with rows of the LP are assigned to."""
        return {
            (row.subject, row.lp): target[0]
            for target, queue in self._queues.items()
            for frame in queue
            for row in frame.waiting
            if row.lp is not None
        }

    def _keyless(self, route: RouteTable | None) -> PartitionName | None:
        """The partition of the rows without a key: each plan uses another one."""
        if route is None:
            return None
        names = [route.partitions[index] for index in sorted(set(route.table.tolist()))]
        free = [name for name in names if not self._full((name, False)) and not self._full((name, True))]
        writable = [name for name in free if route.writable(name.group)] or free
        self._turn += 1
        return writable[self._turn % len(writable)] if writable else None

    def exclusions(self, routes: Mapping[str, RouteTable]) -> list[Exclusion]:
        """What a search for rows leaves out, so that rows of other keys are found behind any number of these."""
        subjects = {frame.subject for queue in self._queues.values() for frame in queue}
        homes = self._homes()
        found: list[Exclusion] = []
        for subject in sorted(subjects):
            route = routes.get(subject)
            if route is None:
                found.append(Exclusion(subject, [(0, LOGICAL_PARTITIONS)], True))
                continue
            full = np.array([self._full((name, False)) or self._full((name, True)) for name in route.partitions])
            mask = full[route.table]
            for (other, lp), name in homes.items():
                if other == subject and name != route.partitions[int(route.table[lp])]:
                    mask[lp] = True
            if mask.any():
                keyless = self._keyless(route) is None
                starts = edges(mask)[:-1]
                runs = [(int(a), int(b)) for a, b in zip(starts, edges(mask)[1:], strict=True) if mask[a]]
                found.append(Exclusion(subject, runs, keyless))
        ranges = list(itertools.accumulate(len(each.runs) for each in found))
        partial = min(bisect_right(ranges, OUTBOX_PARTIAL_RANGES), OUTBOX_PARTIAL_SUBJECTS)
        whole = [Exclusion(each.subject, [(0, LOGICAL_PARTITIONS)], True) for each in found[partial:]]
        return [*found[:partial], *whole]
