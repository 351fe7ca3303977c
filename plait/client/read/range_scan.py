"""Reading a whole range of one partition through its broker, as fast as it comes or at a rate.

The range is cut where frames end, into reads of about a MiB; several are under way at a time, and what they bring is
handed on in order. A broker that restarts meanwhile is asked again for what is missing.

Promise: every row of the range is in exactly one piece, in order, or lies in a gap that a piece names.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from typing import Final, NamedTuple

from plait import tasks
from plait.client.read.surveyor import AGAIN_SECONDS, PartitionSpan, SpanRange, Surveyor
from plait.errors import DataLost, StaleRoute, Timeout, Unavailable
from plait.frame.view import FrameView, frames_in
from plait.limits import KIB, MIB
from plait.wire import messages as m

#: One read: large enough that asking costs next to nothing, small enough that a broker's loop hardly notices it.
READ_SIZE: Final = 1 * MIB
#: Reads under way: while one is decoded, others are on their way and being answered.
AHEAD: Final = 4
#: At a rate, a read is what may be read in this time, so that others' requests never wait behind a heap.
PACE_SECONDS: Final = 0.1
PACED_SIZE_MIN: Final = 64 * KIB


class ScanGap(NamedTuple):
    """Sequences [start, end) that are not there: removed by retention, or else damaged."""

    start: int
    end: int
    expired: bool


class ScanPiece(NamedTuple):
    """Frames that follow on each other but for the gaps; the checksums of none have been looked at."""

    frames: list[FrameView]
    gaps: list[ScanGap]


class ByteRate:
    """A token bucket: so many bytes a second, and no more at once than a tenth of a second brings."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        #: When what was taken so far is paid for (loop time).
        self._paid = -math.inf

    def take(self, size: int, now: float) -> float:
        """Take ``size`` bytes; how long to wait first."""
        begin = max(self._paid, now - PACE_SECONDS)
        self._paid = begin + size / self._rate
        return max(begin - now, 0.0)


class RangeScan:
    """One pass over [start, end) of a partition that ``Surveyor.find`` has found."""

    def __init__(
        self, surveyor: Surveyor, span: PartitionSpan, start: int, end: int, *, bytes_per_second: float | None = None
    ) -> None:
        self._surveyor = surveyor
        self._span = span
        self._start = start
        self._end = end
        self._pace = None if bytes_per_second is None else ByteRate(bytes_per_second)
        self._read_size = READ_SIZE
        if bytes_per_second is not None:
            self._read_size = int(min(max(bytes_per_second * PACE_SECONDS, PACED_SIZE_MIN), READ_SIZE))

    async def __aiter__(self) -> AsyncIterator[ScanPiece]:
        """Piece after piece; leaving early drops the reads that are under way."""
        pieces = await self._pieces()
        reads: deque[tuple[int, int, asyncio.Task[list[FrameView]]]] = deque()
        try:
            while pieces or reads:
                while pieces and len(reads) < AHEAD:
                    start, end, size = pieces.popleft()
                    reads.append((start, end, tasks.child(self._read(start, end, size), "plait-scan")))
                start, end, read = reads[0]
                frames = await read
                reads.popleft()
                yield ScanPiece(frames, await self._gaps(frames, start, end))
        finally:
            for _, _, read in reads:
                read.cancel()
            await asyncio.gather(*(read for _, _, read in reads), return_exceptions=True)

    async def _pieces(self) -> deque[tuple[int, int, int]]:
        """(start, end, about how many bytes) of each read."""
        whole = SpanRange(self._span.place, self._start, self._end)
        (cuts,) = await self._surveyor.cuts([whole], self._read_size)
        ends = cuts.ends or [self._end]
        # What is expired or gone by now is asked for all the same, and becomes a gap.
        ends[-1] = self._end
        starts = [self._start, *ends[:-1]]
        share = cuts.size // len(ends) + 1
        return deque((start, end, share) for start, end in zip(starts, ends, strict=True))

    async def _read(self, start: int, end: int, size: int) -> list[FrameView]:
        if self._pace is not None:
            await asyncio.sleep(self._pace.take(size, asyncio.get_running_loop().time()))
        frames: list[FrameView] = []
        at = start
        while at < end:
            reply, payload = await self._ask(at, end)
            if reply.partition != self._span.number:
                raise DataLost(f"{self._span.place} was deleted and made anew while it was read; read again")
            if reply.next < at or (reply.next == at and not payload):
                # At its end, or only busy with what it has sent already.
                await self._check_end(at, end)
                continue
            found = frames_in(payload)
            if reply.next > end:
                # Rows at the beginning have expired meanwhile, or do not read back: others came in their place.
                found, at = _before(end, found)
            else:
                at = reply.next
            frames += found
        return frames

    async def _ask(self, at: int, end: int) -> tuple[m.ReadReply, memoryview]:
        limits = self._surveyor.limits
        node = self._surveyor.node(self._span.place)
        deadline = asyncio.get_running_loop().time() + limits.send_seconds
        while True:
            link = await node.ready(limits.send_seconds)
            # One frame at least is answered with, and none is cut for its size: the count alone says what is wanted.
            request = m.ReadRequest(self._span.name, ("sequence", at), end - at, 2 * READ_SIZE, 0.0)
            try:
                async with asyncio.timeout(limits.request_seconds):
                    return await link.request_payload(request)
            except (Unavailable, StaleRoute):
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                await asyncio.sleep(AGAIN_SECONDS)
            except TimeoutError:
                raise Timeout(f"no answer to a read of {self._span.place} at sequence {at}") from None

    async def _check_end(self, at: int, end: int) -> None:
        """``DataLost`` where the partition ends before it should."""
        spans = await self._surveyor.spans([self._span.place])
        if not spans or spans[0].number != self._span.number:
            raise DataLost(f"{self._span.place} was deleted while it was read")
        if spans[0].end < end:
            raise DataLost(
                f"{self._span.place} ends at sequence {spans[0].end}, and {at} to {end - 1} were there when the query "
                "was planned: its broker lost the tail of its log",
                start=spans[0].end,
                end=end,
            )

    async def _gaps(self, frames: list[FrameView], start: int, end: int) -> list[ScanGap]:
        """What of [start, end) no frame has."""
        gaps: list[tuple[int, int]] = []
        expected = start
        for frame in frames:
            first = _first(frame)
            if first > expected:
                gaps.append((expected, first))
            expected = first + frame.count
        if expected < end:
            gaps.append((expected, end))
        if not gaps:
            return []
        spans = await self._surveyor.spans([self._span.place])
        kept_from = spans[0].start if spans else end
        return [ScanGap(first, last, first < kept_from) for first, last in gaps]


def _first(frame: FrameView) -> int:
    """The sequence of its first row."""
    selection = frame.selection()
    return frame.base if selection is None else frame.base + int(selection.rows[0])


def _before(end: int, frames: list[FrameView]) -> tuple[list[FrameView], int]:
    """Those that lie before ``end``, and where to go on: one that passes it is asked for again, up to there."""
    for index, frame in enumerate(frames):
        first = _first(frame)
        if first + frame.count > end:
            return frames[:index], min(first, end)
    return frames, end
