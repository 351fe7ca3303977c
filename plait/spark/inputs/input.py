"""The interface of an input: it lists the partitions and makes tasks that read ranges of them.

The driver calls the input, a stream calls it for every batch. A task then reads its part without the driver.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from plait.client.read.surveyor import PartitionSpan, SpanRange
from plait.frame.view import FrameView
from plait.spark.inputs.archive_input import ArchiveInput, is_archive
from plait.spark.inputs.broker_input import BrokerInput
from plait.spark.inputs.log_input import LogInput
from plait.spark.source.read_options import ReadOptions
from plait.storage.reading.log_chunks import ChunkPartition, WantedRows


class InputTask(Protocol):
    """A part of the work of a query; pickled to the worker that runs it."""

    #: The broker group of its partitions.
    group: str

    def frames(self, options: ReadOptions, wanted: WantedRows) -> Iterator[tuple[ChunkPartition, FrameView]]:
        """The frames to be read, verified and in order. The first and the last may have rows beyond the bounds."""
        ...

    def damage(self, options: ReadOptions, reason: str) -> Exception:
        """The error to raise where the columns of a frame cannot be decoded."""
        ...


class Input(Protocol):
    """Something that Spark jobs read: a data directory, brokers or an archive."""

    #: Whether retention removes messages: then a partition that begins after sequence 0 has lost some. An archive
    #: records in its manifest what it never had.
    expires: bool

    def spans(self, times: Sequence[int] = ()) -> list[PartitionSpan]:
        """Every partition of the subjects as of now; one span for each life of a partition, the oldest first."""
        ...

    def sizes(self, ranges: Sequence[SpanRange]) -> list[int]:
        """The approximate size of each range in bytes."""
        ...

    def reach(self, ranges: Sequence[SpanRange], sizes: Sequence[int]) -> list[int]:
        """The end of each range when it is limited to about ``sizes`` bytes and at least one frame."""
        ...

    def tasks(self, ranges: Sequence[SpanRange], spans: Sequence[PartitionSpan], tasks_min: int) -> list[Any]:
        """Tasks for the ranges: ``tasks_min`` or more, where there is enough to read."""
        ...

    def close(self) -> None:
        """Close connections; the next call opens them again."""
        ...


def input_of(options: ReadOptions, wanted: WantedRows) -> Input:
    """The input that the options name."""
    if options.server:
        return BrokerInput(options, wanted)
    return ArchiveInput(options, wanted) if is_archive(options.path) else LogInput(options, wanted)
