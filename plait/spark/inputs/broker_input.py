"""The input for brokers: the driver asks them for their partitions, and each task reads a range from its broker."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from plait.client.blocking.loop_thread import shared_loop
from plait.client.read.range_scan import RangeScan, ScanGap, ScanPiece
from plait.client.read.surveyor import PartitionSpan, SpanRange, Surveyor
from plait.errors import Closed, DamageError, FrameError
from plait.frame.view import FrameView
from plait.model.filter_terms import FilterTerms
from plait.spark.source.offsets import check_epoch, report
from plait.spark.source.read_options import ReadOptions
from plait.storage.reading.log_chunks import CHUNK_SIZE, ChunkPartition, WantedRows

log = logging.getLogger("plait.spark")

#: The minimum size of a task: connecting takes as long as reading this much.
PIECE_SIZE_MIN: Final = 1 << 20


@dataclass(frozen=True)
class BrokerTask:
    """Reads a range of one partition."""

    span: PartitionSpan
    start: int
    end: int
    #: This task's share of the read rate of the query; None: unlimited.
    bytes_per_second: float | None

    @property
    def group(self) -> str:
        return self.span.group

    def frames(self, options: ReadOptions, wanted: WantedRows) -> Iterator[tuple[ChunkPartition, FrameView]]:
        """The frames in order; the next ones are fetched while the caller handles one."""
        span = self.span
        partition = ChunkPartition(span.subject, span.name, self.start, self.end)
        for piece in self._pieces(options, wanted.filter):
            for gap in piece.gaps:
                self._missing(gap, options)
            for frame in piece.frames:
                if not wanted.takes(frame.base, frame.end - frame.base, frame.store_time):
                    continue
                try:
                    frame.verify()
                except FrameError as error:
                    raise self.damage(options, str(error)) from error
                check_epoch(span, frame)
                yield partition, frame

    def _pieces(self, options: ReadOptions, wanted: FilterTerms | None) -> Iterator[ScanPiece]:
        """Read on an event loop in another thread, so that heartbeats continue while Spark handles a batch."""
        run = shared_loop().run
        surveyor = Surveyor(options.server)
        run(surveyor.open())
        pieces: AsyncIterator[ScanPiece] | None = None
        try:
            run(surveyor.find([self.span.subject]))
            rate = self.bytes_per_second
            scan = RangeScan(surveyor, self.span, self.start, self.end, bytes_per_second=rate, wanted=wanted)
            pieces = aiter(scan)
            while (piece := run(_next(pieces))) is not None:
                yield piece
        finally:
            # A task that Spark does not read to its end is closed late, perhaps at interpreter exit.
            with contextlib.suppress(Closed):
                run(_close(pieces, surveyor))

    def _missing(self, gap: ScanGap, options: ReadOptions) -> None:
        what = f"sequences {gap.start} to {gap.end - 1}"
        if gap.expired:
            report([f"{what} of {self.span.place} were removed by retention"], fail=options.fail_on_loss)
        elif options.fail_on_damage:
            raise self.damage(options, f"{what} cannot be read")
        else:
            log.warning("%s of %s are damaged and left out; run 'plait doctor' there", what, self.span.place)

    def damage(self, options: ReadOptions, reason: str) -> DamageError:
        return DamageError(
            f"{self.span.place} at {', '.join(options.server)} is damaged: {reason}. Run 'plait doctor' at its broker, "
            "or leave the damaged messages out with the option failOnDamage=false"
        )


async def _next(pieces: AsyncIterator[ScanPiece]) -> ScanPiece | None:
    return await anext(pieces, None)


async def _close(pieces: AsyncIterator[ScanPiece] | None, surveyor: Surveyor) -> None:
    close = getattr(pieces, "aclose", None)
    if close is not None:
        await close()
    await surveyor.close()


class BrokerInput:
    """Brokers. The connections stay open between calls, since a stream calls often."""

    expires = True

    def __init__(self, options: ReadOptions, wanted: WantedRows) -> None:
        self._options = options
        self._wanted = wanted
        self._surveyor: Surveyor | None = None

    def close(self) -> None:
        """Close the connections."""
        surveyor, self._surveyor = self._surveyor, None
        if surveyor is not None:
            shared_loop().run(surveyor.close())

    def _open(self) -> Surveyor:
        if self._surveyor is None:
            self._surveyor = shared_loop().run(Surveyor(self._options.server).open())
        return self._surveyor

    def spans(self, times: Sequence[int] = ()) -> list[PartitionSpan]:
        """As their brokers report them now. Reads the route again, since it may have more partitions."""
        surveyor, wanted = self._open(), self._wanted

        async def ask() -> list[PartitionSpan]:
            places = await surveyor.find(wanted.subjects, wanted.prefixes)
            return await surveyor.spans(places, times)

        return [span for span in shared_loop().run(ask()) if wanted.keeps(span.subject, span.name)]

    def sizes(self, ranges: Sequence[SpanRange]) -> list[int]:
        """From the consume logs of the brokers."""
        return [cuts.size for cuts in shared_loop().run(self._open().cuts(ranges, 0))]

    def reach(self, ranges: Sequence[SpanRange], sizes: Sequence[int]) -> list[int]:
        """From the consume logs of the brokers."""
        found = shared_loop().run(self._open().reach(ranges, sizes))
        return [cuts.ends[0] if cuts.ends else each.end for cuts, each in zip(found, ranges, strict=True)]

    def tasks(self, ranges: Sequence[SpanRange], spans: Sequence[PartitionSpan], tasks_min: int) -> list[BrokerTask]:
        """Tasks of about equal size; with a rate limit, few enough to run at the same time and share the rate."""
        ranges = [each for each in ranges if each.start < each.end]
        if not ranges:
            return []
        by_place = {span.place: span for span in spans}
        total = sum(self.sizes(ranges))
        rate = self._options.bytes_per_second
        # As for files: with ``tasks_min`` tasks there are as many workers to run them.
        rounds = max(-(-total // (CHUNK_SIZE * tasks_min)), 1) if rate is None else 1
        size = max(-(-total // (rounds * tasks_min)), PIECE_SIZE_MIN)
        cuts = shared_loop().run(self._open().cuts(ranges, size))
        pieces = []
        for each, found in zip(ranges, cuts, strict=True):
            ends = found.ends or [each.end]
            ends[-1] = each.end
            pieces += [(each, start, end) for start, end in zip([each.start, *ends[:-1]], ends, strict=True)]
        share = None if rate is None else rate / len(pieces)
        return [BrokerTask(by_place[each.place], start, end, share) for each, start, end in pieces]
