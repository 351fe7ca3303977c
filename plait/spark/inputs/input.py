"""Where messages are read from: a data directory, brokers or an archive. Each says what there is and makes tasks of it.

The driver asks; a task then reads its share on its own. A place may be asked again and again, as a stream does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from plait.client.read.surveyor import PartitionSpan, SpanRange
from plait.frame.view import FrameView
from plait.spark.source.read_options import ReadOptions
from plait.storage.reading.log_chunks import ChunkPartition, WantedRows

#: A frame, and the partition that it is of: what tasks read.
Member = tuple[ChunkPartition, FrameView]


class InputTask(Protocol):
    """A share of the work, pickled to where it is done."""

    #: The broker group that its partitions are on.
    group: str

    def frames(self, options: ReadOptions, wanted: WantedRows) -> Iterator[Member]:
        """The frames to be read, verified and in order; those at a partition's bounds may have rows beyond them."""
        ...

    def damage(self, options: ReadOptions, reason: str) -> Exception:
        """What is raised where the columns of a frame do not read back."""
        ...


class Input(Protocol):
    """Something to read from."""

    #: Retention removes messages of it: a partition that begins behind sequence 0 has lost some. What an archive never
    #: had is noted in its manifest.
    expires: bool

    def spans(self, times: Sequence[int] = ()) -> list[PartitionSpan]:
        """Every partition of the subjects, as it is now; where it has several lives, one after another."""
        ...

    def sizes(self, ranges: Sequence[SpanRange]) -> list[int]:
        """About how many bytes each range has."""
        ...

    def reach(self, ranges: Sequence[SpanRange], sizes: Sequence[int]) -> list[int]:
        """Where each range ends when it is to have at most about so many bytes, and one frame at least."""
        ...

    def tasks(self, ranges: Sequence[SpanRange], spans: Sequence[PartitionSpan], tasks_min: int) -> list[Any]:
        """The ranges as tasks: ``tasks_min`` or more, where there is enough to share."""
        ...

    def close(self) -> None:
        """Hang up, where there are links; whoever asks again is connected again."""
        ...


def place_of(options: ReadOptions, wanted: WantedRows) -> Input:
    """What the options name."""
    if options.server:
        from plait.spark.inputs.broker_input import BrokerInput

        return BrokerInput(options, wanted)
    from plait.spark.inputs.archive_input import ArchiveInput, is_archive

    if is_archive(options.path):
        return ArchiveInput(options, wanted)
    from plait.spark.inputs.log_input import LogInput

    return LogInput(options, wanted)
