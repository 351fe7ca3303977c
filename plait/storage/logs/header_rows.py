"""The rows of segment headers, encoded once and used in the headers of many segments."""

from __future__ import annotations

from typing import Final, NamedTuple

from plait.frame.builder import Encoded, FrameParts, assemble, body_column

#: Header rows are compressed, because the headers of many subjects are read and held in memory in full. They consist of
#: similar names and numbers, so they shrink to an eighth.
COMPRESSION: Final = "lz4"


class HeaderRows(NamedTuple):
    """The rows of one frame that is not numbered and stamped yet."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    column: Encoded

    @property
    def size(self) -> int:
        """The size in memory, in bytes."""
        return sum(map(len, self.column[2]))

    def frame(self, first: int, previous_end: int, stamp: bytes) -> FrameParts:
        """The frame for a segment whose predecessor ended at ``previous_end``."""
        return assemble(
            [self.column], count=self.count, producer=0, first=first, previous=previous_end, flags=0, stamp=stamp
        )


def header_rows(rows: list[bytes], rows_max: int) -> list[HeaderRows]:
    """The rows, divided into frames of at most ``rows_max`` rows."""
    pages = (rows[start : start + rows_max] for start in range(0, len(rows), rows_max))
    return [HeaderRows(len(page), body_column(page, COMPRESSION)) for page in pages]
