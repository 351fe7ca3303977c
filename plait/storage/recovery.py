"""Reading a log back after any kind of stop: which frames stand, what is damaged, where the log goes on.

The rule (R18): a bad frame below an offset that is known durable, or before a valid frame, is *damage*: its bytes are
copied to quarantine/, reported and left in place, and reading goes on behind it. A bad frame with nothing valid
after it is a *torn tail*: the bytes are kept aside and cut, so that they can never be taken for frames later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from plait.errors import FrameError
from plait.frame.header import HEADER_SIZE, PREFIX
from plait.frame.view import FrameView
from plait.storage.disk import Disk
from plait.storage.log import Log, Segment, used_size

QUARANTINE = "quarantine"
#: At most this much of one damaged region is copied aside; the region itself stays in the log.
QUARANTINE_SIZE_MAX = 64 << 20


class Damage(msgspec.Struct, frozen=True):
    """A region of a log that holds no readable frame."""

    log: str
    offset: int
    size: int
    #: "damaged": left in place, skipped. "torn": an unfinished tail, cut.
    kind: str
    reason: str


#: Says whether a frame found after damage can be the log's own, not one inside somebody's message body.
Plausible = Callable[[int, FrameView], bool]


class LogScan:
    """One pass over a log from ``start``; after iterating, ``end``, ``durable`` and ``damages`` are known."""

    def __init__(
        self,
        log: Log,
        start: int,
        durable: int = 0,
        plausible: Plausible | None = None,
        *,
        stamps_durable: bool = True,
    ) -> None:
        self._log = log
        #: The frames' ``durable`` field speaks of this log (in the action log it speaks of the message log).
        self._stamps_durable = stamps_durable
        self._plausible = plausible or (lambda offset, frame: True)
        self._start = start
        self.durable = durable
        self.end = start
        self.damages: list[Damage] = []

    def __iter__(self) -> Iterator[tuple[int, FrameView]]:
        """(offset, frame) of every valid frame in order."""
        for segment in list(self._log.segments):
            if segment.end <= self._start:
                continue
            yield from self._segment(segment, max(self._start - segment.base, 0))
        self._finish()

    def stop_before(self, offset: int) -> None:
        """The reader refuses the frame at ``offset``: what follows is a tail to be cut."""
        self.end = offset
        segment = self._log.segment_at(offset)
        size = used_size(segment.view, offset - segment.base)
        self.damages.append(Damage(self._log.directory, offset, size, "torn", "rests on messages that were lost"))

    def _segment(self, segment: Segment, position: int) -> Iterator[tuple[int, FrameView]]:
        view = segment.view
        while position + HEADER_SIZE <= segment.size:
            reason = ""
            try:
                frame = FrameView(view, position).verify()
            except FrameError as error:
                reason = str(error)
            else:
                offset = segment.base + position
                yield offset, frame
                if self._stamps_durable:
                    self.durable = max(self.durable, frame.durable)
                position += frame.size
                self.end = offset + frame.size
                continue
            if not used_size(view, position):
                return
            found = self._next_valid(segment, position + 8)
            if found < 0:
                # Whether this is damage or a torn tail depends on what the later segments hold.
                size = used_size(view, position)
                self.damages.append(Damage(self._log.directory, segment.base + position, size, "damaged", reason))
                return
            self.damages.append(
                Damage(self._log.directory, segment.base + position, found - position, "damaged", reason)
            )
            position = found

    def _next_valid(self, segment: Segment, position: int) -> int:
        """Where the next believable frame starts, or -1."""
        data = bytes(segment.view[position : position + used_size(segment.view, position)])
        at = data.find(PREFIX)
        while at >= 0:
            if (position + at) & 7 == 0:
                try:
                    frame = FrameView(segment.view, position + at).verify()
                except FrameError:
                    pass
                else:
                    if self._plausible(segment.base + position + at, frame):
                        return position + at
            at = data.find(PREFIX, at + 1)
        return -1

    def _finish(self) -> None:
        """Tell the torn tail from damage, and never reuse an offset that was durable."""
        kept: list[Damage] = []
        for damage in self.damages:
            tail = damage.offset >= self.end
            if tail and damage.offset >= self.durable:
                damage = msgspec.structs.replace(damage, kind="torn")
            elif tail and damage.offset + damage.size > self.durable:
                size = self.durable - damage.offset
                kept.append(msgspec.structs.replace(damage, size=size))
                damage = msgspec.structs.replace(damage, offset=self.durable, size=damage.size - size, kind="torn")
            kept.append(damage)
        if self.end < self.durable and not any(
            d.kind == "damaged" and d.offset <= self.end < d.offset + d.size for d in kept
        ):
            kept.append(
                Damage(
                    self._log.directory,
                    self.end,
                    self.durable - self.end,
                    "damaged",
                    "durable bytes are missing",
                )
            )
        self.damages = kept
        self.end = max(self.end, self.durable)


def settle(disk: Disk, log: Log, scan: LogScan) -> None:
    """Keep the bad bytes aside, cut the torn tail, and set the log to go on where the scan ended."""
    for damage in scan.damages:
        keep_aside(disk, log, damage)
    log.zero_from(scan.end)
    log.resume_at(scan.end)


def keep_aside(disk: Disk, log: Log, damage: Damage) -> None:
    """Copy a region to quarantine/, once."""
    path = f"{QUARANTINE}/{log.directory}-{damage.offset:020d}-{damage.kind}"
    if disk.exists(path) or damage.size == 0:
        return
    segment = log.segment_at(damage.offset)
    start = damage.offset - segment.base
    data = bytes(segment.view[start : start + min(damage.size, QUARANTINE_SIZE_MAX)])
    disk.make_directory(QUARANTINE)
    file = disk.open(path, create=True)
    try:
        file.write([data], 0)
        file.sync()
    finally:
        file.close()
    disk.sync_directory(QUARANTINE)
