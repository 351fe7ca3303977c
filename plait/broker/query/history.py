"""``HistoryReader``: the events of a group that concern one message, from the action log, the newest first.

A segment is read from its end: first the positions of its frames, then the frames in reverse. A step reads a bounded
number of frames and may run in a thread. In an ordered group an event concerns the rows of a cursor, and cursors split
and join; the reader follows the cursor of the message back through these events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from plait.errors import FrameError
from plait.frame.header import HEADER_SIZE, PREFIX, U32
from plait.frame.view import FrameView
from plait.storage.logs.action_events import (
    OF_ROWS,
    Acked,
    Action,
    Held,
    Joined,
    Locked,
    Moved,
    Nacked,
    Returned,
    Rewound,
    RowEvent,
    WentOffline,
    unpack_event,
)
from plait.storage.logs.action_log import DEFINITIONS, EVENTS, ConsumerDefinition, read_definitions, read_events
from plait.wire.admin.why import HistoryRow

#: Frames of one step: a few milliseconds.
STEP_FRAMES: Final = 500
#: Frames of the action log that one explanation reads at most, and events that it lists at most.
FRAMES_MAX: Final = 200_000
EVENTS_MAX: Final = 1_000

#: The wall clock may have been set back by this many microseconds.
CLOCK_SLACK: Final = 60_000_000

_ROWS: Final = np.array(sorted(OF_ROWS), np.uint8)
_OTHERS: Final = np.array([Action.OFFLINE, Action.REWIND, Action.LOCK, Action.MOVE, Action.HOLD, Action.JOIN], np.uint8)


class ActionPiece(NamedTuple):
    """A written part of a segment of the action log."""

    view: memoryview
    size: int


class Concerned(NamedTuple):
    """The message that a history is about; ``cursor`` is 0 in a shared group."""

    group: int
    sequence: int
    stored: int
    lp: int = -1
    key: int | None = None
    cursor: int = 0
    #: The present owner of the logical partition in an ordered group; 0: none.
    owner: int = 0


class HistoryReader:
    """Reads until the message was stored, or until enough was read."""

    def __init__(self, pieces: Sequence[ActionPiece], message: Concerned, *, ordered: bool) -> None:
        #: The newest is the last.
        self._pieces = list(pieces)
        self._message = message
        self._ordered = ordered
        #: Numbers that the cursor of the message may have had at the time that the reader has reached.
        self._cursors = {message.cursor}
        self._positions: list[int] = []
        self._at = 0
        self._frames = 0
        #: The times and events that were found, the newest first; whether each is certain.
        self._found: list[tuple[int, Any, bool]] = []
        #: Consumer → client id.
        self._names: dict[int, str] = {}
        self.partial = False
        self.reached = 0
        self._over = False

    def step(self) -> bool:
        """Read some more. False: the history is complete, or as long as it may be."""
        for _ in range(STEP_FRAMES):
            if self._over or not self._pieces:
                return False
            piece = self._pieces[-1]
            if self._at >= 0 and not self._next_position(piece):
                # All positions are known; now the frames in reverse.
                self._at = -1
            if self._at < 0:
                if not self._positions:
                    self._pieces.pop()
                    self._at = 0
                    continue
                self._frame(piece, self._positions.pop())
            self._frames += 1
            if self._frames >= FRAMES_MAX or len(self._found) >= EVENTS_MAX:
                self.partial = self._over = True
        return not self._over

    def _next_position(self, piece: ActionPiece) -> bool:
        """Note the position of the next frame; False: there is none."""
        at = self._at
        if at + HEADER_SIZE > piece.size or piece.view[at : at + 3] != PREFIX:
            return False
        size = int(U32.unpack_from(piece.view, at + 4)[0])
        if size <= HEADER_SIZE or size & 7 or at + size > piece.size:
            return False
        self._positions.append(at)
        self._at = at + size
        return True

    def _frame(self, piece: ActionPiece, position: int) -> None:
        try:
            frame = FrameView(piece.view, position).verify()
            if frame.partition == DEFINITIONS:
                for each in read_definitions(frame):
                    if isinstance(each, ConsumerDefinition) and each.group == self._message.group:
                        self._names.setdefault(each.id, each.client)
                return
            if frame.partition != EVENTS:
                return
            events = read_events(frame)
        except (FrameError, ValueError):
            # Recovery has reported the damage.
            return
        if frame.store_time < self._message.stored - CLOCK_SLACK:
            self._over = True
            return
        self.reached = frame.store_time
        mine = events[events["group"] == self._message.group]
        if not len(mine):
            return
        rows, sequence = np.isin(mine["action"], _ROWS), np.uint64(self._message.sequence)
        rows &= (mine["start"] <= sequence) & (sequence < mine["end"])
        for row in mine[rows | np.isin(mine["action"], _OTHERS)][::-1]:
            self._event(frame.store_time, unpack_event(row.tobytes())[2])

    def _event(self, time: int, event: Any) -> None:
        message = self._message
        if not self._ordered:
            if isinstance(event, Rewound):
                self._rewound(time, event)
            elif not isinstance(event, Locked | Moved | Held | Joined):
                self._found.append((time, event, True))
        elif isinstance(event, Joined):
            if event.cursor in self._cursors:
                # The row was in one of the two.
                self._cursors.add(event.other)
        elif isinstance(event, Moved | Held):
            mine = event.key_hash == message.key if isinstance(event, Held) else event.start <= message.lp < event.end
            if event.to in self._cursors:
                self._cursors.discard(event.to)
                if mine:
                    self._cursors.add(event.cursor)
        elif isinstance(event, Locked):
            if event.start <= message.lp < event.end:
                self._found.append((time, event, True))
        elif isinstance(event, Rewound):
            if event.cursor:
                # The cursors before it are unknown.
                self._over = True
            self._rewound(time, event)
        elif isinstance(event, RowEvent) and _holder(event) in {*self._cursors, 0} and not isinstance(event, Returned):
            self._found.append((time, event, len(self._cursors) == 1))

    def _rewound(self, time: int, event: Rewound) -> None:
        """Rows from the position on come again; earlier ones are skipped, if the rewind skips any."""
        if event.skipping or event.sequence <= self._message.sequence:
            self._found.append((time, event, True))

    def rows(self, names: dict[int, str]) -> list[HistoryRow]:
        """The events, the newest first. ``names``: the client ids of present consumers."""
        known = {**self._names, **names}
        rows: list[HistoryRow] = []
        # Without a change of the locks the present owner had the message all the time.
        held_by = 0 if any(isinstance(event, Locked) for _, event, _ in self._found) else self._message.owner
        for time, event, certain in reversed(self._found):
            if isinstance(event, WentOffline):
                # It concerns the message only if the consumer had it.
                if event.consumer != held_by:
                    continue
                consumer = event.consumer
            elif isinstance(event, Locked):
                held_by = event.consumer
                continue
            else:
                consumer = held_by if self._ordered else _holder(event)
            if not self._ordered:
                held_by = consumer if event.action == Action.PULL else 0
            rows.append(
                HistoryRow(
                    time,
                    self._name(event),
                    known.get(consumer, f"consumer {consumer}") if consumer and _by_consumer(event) else "",
                    getattr(event, "attempt", 0),
                    event.due if isinstance(event, Nacked) else 0,
                    isinstance(event, Nacked) and event.uncounted,
                    certain,
                )
            )
        return rows[::-1]

    def _name(self, event: Any) -> str:
        if isinstance(event, Rewound) and event.sequence > self._message.sequence:
            return "passed"
        name: str = event.action.name
        return name.lower()


def _by_consumer(event: Any) -> bool:
    return event.action in (Action.PULL, Action.ACK, Action.NACK, Action.BURY, Action.OFFLINE)


def _holder(event: Any) -> int:
    """The consumer of a shared group, or the cursor of an ordered group; 0: none."""
    if isinstance(event, Acked | Nacked):
        return event.holder
    for name in ("consumer", "holder", "cursor"):
        if hasattr(event, name):
            return int(getattr(event, name))
    return 0
