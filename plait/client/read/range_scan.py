"""Reads a whole range of one partition through its broker, at full speed or at a limited rate.

The range is cut at frame boundaries into reads of about a MiB. Several reads run at a time, and their results are
returned in order. Reads that fail because the broker restarts are repeated. With a filter the broker examines the rows,
and one read after another continues where it stopped.

Promise: every row of the range (that matches the filter) is in exactly one piece, in order, or in a gap that a piece
names.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Final, NamedTuple

from plait import tasks
from plait.client.net.rate_limit import RateLimit
from plait.client.read.surveyor import AGAIN_SECONDS, PartitionSpan, SpanRange, Surveyor
from plait.errors import DataLost, StaleRoute, Timeout, Unavailable
from plait.frame.view import FrameView, frames_in
from plait.limits import KIB, MIB
from plait.model.filter_terms import FilterTerms
from plait.wire import messages as m

#: Bytes of one read: large enough to make the request's cost negligible, small enough not to delay the broker's loop.
READ_SIZE: Final = 1 * MIB
#: Reads at a time: while the client decodes one, the broker answers others.
AHEAD: Final = 4
#: With a rate limit, a read takes the bytes of this time, so that requests of other clients do not wait long.
PACE_SECONDS: Final = 0.1
PACED_SIZE_MIN: Final = 64 * KIB


class ScanGap(NamedTuple):
    """Missing sequences [start, end): removed by retention if ``expired``, otherwise damaged."""

    start: int
    end: int
    expired: bool


class ScanPiece(NamedTuple):
    """Consecutive frames, except for the gaps. Their checksums are not verified."""

    frames: list[FrameView]
    gaps: list[ScanGap]


class RangeScan:
    """One pass over [start, end) of a partition that ``Surveyor.find`` returned."""

    def __init__(
        self,
        surveyor: Surveyor,
        span: PartitionSpan,
        start: int,
        end: int,
        *,
        bytes_per_second: float | None = None,
        wanted: FilterTerms | None = None,
    ) -> None:
        self._filter = wanted
        self._surveyor = surveyor
        self._span = span
        self._start = start
        self._end = end
        self._pace = None if bytes_per_second is None else RateLimit(bytes_per_second, PACE_SECONDS)
        self._read_size = READ_SIZE
        if bytes_per_second is not None:
            self._read_size = int(min(max(bytes_per_second * PACE_SECONDS, PACED_SIZE_MIN), READ_SIZE))

    async def __aiter__(self) -> AsyncIterator[ScanPiece]:
        """Yield the pieces in order. Leaving early cancels the running reads.

        With a filter the last piece may have rows after the end.
        """
        if self._filter is not None:
            async with aclosing(self._matching()) as matching:
                async for piece in matching:
                    yield piece
            return
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

    async def _matching(self) -> AsyncGenerator[ScanPiece, None]:
        """The pieces of a scan with a filter. A read examines rows until it finds some or its turn is over."""
        at, loop = self._start, asyncio.get_running_loop()
        deadline = loop.time() + self._surveyor.limits.send_seconds
        while at < self._end:
            reply, payload = await self._ask(at, self._end)
            if reply.next <= at:
                await self._stalled(at, self._end, deadline)
                continue
            deadline = loop.time() + self._surveyor.limits.send_seconds
            missing = [(first, min(end, self._end)) for first, end in reply.missing if first < self._end]
            yield ScanPiece(frames_in(payload), await self._named(missing))
            at = reply.next
            if self._pace is not None:
                await asyncio.sleep(self._pace.take(len(payload), loop.time()))

    async def _pieces(self) -> deque[tuple[int, int, int]]:
        """(start, end, approximate bytes) of each read."""
        whole = SpanRange(self._span.place, self._start, self._end)
        (cuts,) = await self._surveyor.cuts([whole], self._read_size)
        ends = cuts.ends or [self._end]
        # Rows that have expired by now are still requested, and become a gap.
        ends[-1] = self._end
        starts = [self._start, *ends[:-1]]
        share = cuts.size // len(ends) + 1
        return deque((start, end, share) for start, end in zip(starts, ends, strict=True))

    async def _read(self, start: int, end: int, size: int) -> list[FrameView]:
        if self._pace is not None:
            await asyncio.sleep(self._pace.take(size, asyncio.get_running_loop().time()))
        frames: list[FrameView] = []
        at = start
        loop, patience = asyncio.get_running_loop(), self._surveyor.limits.send_seconds
        deadline = loop.time() + patience
        while at < end:
            reply, payload = await self._ask(at, end)
            if reply.next < at or (reply.next == at and not payload):
                await self._stalled(at, end, deadline)
                continue
            deadline = loop.time() + patience
            found = frames_in(payload)
            if reply.next > end:
                # Rows at the start have expired or are damaged, and the broker returned later rows instead.
                found, at = _before(end, found)
            else:
                at = reply.next
            frames += found
        return frames

    async def _stalled(self, at: int, end: int, deadline: float) -> None:
        """Wait a moment: the partition has ended, or the broker is still busy sending earlier replies."""
        await self._check_end(at, end)
        if asyncio.get_running_loop().time() >= deadline:
            raise Unavailable(
                f"{self._span.place} has rows {at} to {end - 1}, but its broker returned none of them within "
                f"{self._surveyor.limits.send_seconds:g} s; read again"
            )
        await asyncio.sleep(AGAIN_SECONDS)

    async def _ask(self, at: int, end: int) -> tuple[m.ReadReply, memoryview]:
        limits = self._surveyor.limits
        node = self._surveyor.node(self._span.place)
        deadline = asyncio.get_running_loop().time() + limits.send_seconds
        while True:
            link = await node.ready(limits.send_seconds)
            # A reply has at least one frame and cuts none because of its size, so the count alone limits the read.
            request = m.ReadRequest(self._span.name, ("sequence", at), end - at, 2 * READ_SIZE, 0.0, self._filter)
            try:
                async with asyncio.timeout(limits.request_seconds):
                    reply, payload = await link.request_payload(request)
                if reply.partition != self._span.number:
                    raise DataLost(f"{self._span.place} was deleted and created again while it was read; read again")
                return reply, payload
            except (Unavailable, StaleRoute):
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                await asyncio.sleep(AGAIN_SECONDS)
            except TimeoutError:
                raise Timeout(f"no answer to a read of {self._span.place} at sequence {at}; read again") from None

    async def _check_end(self, at: int, end: int) -> None:
        """Raise ``DataLost`` if the partition ends before ``end``, or was deleted."""
        spans = await self._surveyor.spans([self._span.place])
        if not spans or spans[0].number != self._span.number:
            raise DataLost(f"{self._span.place} was deleted while it was read; plan the query again")
        if spans[0].end < end:
            raise DataLost(
                f"{self._span.place} ends at sequence {spans[0].end}, but had {at} to {end - 1} when the query was "
                "planned: its broker lost the tail of its log",
                start=spans[0].end,
                end=end,
            )

    async def _gaps(self, frames: list[FrameView], start: int, end: int) -> list[ScanGap]:
        """The sequences of [start, end) that no frame has."""
        gaps: list[tuple[int, int]] = []
        expected = start
        for frame in frames:
            first = _first(frame)
            if first > expected:
                gaps.append((expected, first))
            expected = first + frame.count
        if expected < end:
            gaps.append((expected, end))
        return await self._named(gaps)

    async def _named(self, gaps: list[tuple[int, int]]) -> list[ScanGap]:
        """Whether each gap has expired or is damaged."""
        if not gaps:
            return []
        spans = await self._surveyor.spans([self._span.place])
        log_start = spans[0].start if spans else gaps[-1][1]
        return [ScanGap(first, last, first < log_start) for first, last in gaps]


def _first(frame: FrameView) -> int:
    selection = frame.selection()
    return frame.base if selection is None else frame.base + int(selection.rows[0])


def _before(end: int, frames: list[FrameView]) -> tuple[list[FrameView], int]:
    """The frames before ``end``, and the sequence of the next read.

    A frame that crosses ``end`` is left out, and requested again up to there.
    """
    for index, frame in enumerate(frames):
        first = _first(frame)
        if first + frame.count > end:
            return frames[:index], min(first, end)
    return frames, end
