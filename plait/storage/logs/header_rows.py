"""Rows of the head of a log segment, encoded once and put into the frames of many segments."""

from __future__ import annotations

from typing import Final, NamedTuple

from plait.frame.builder import Encoded, FrameParts, assemble, body_column

#: Names and numbers that resemble each other: an eighth is left of them, and the heads of many subjects are read and
#: kept in memory in full.
COMPRESSION: Final = "lz4"


class HeaderRows(NamedTuple):
    """The rows of one frame, which has yet to be numbered and stamped."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    column: Encoded

    @property
    def size(self) -> int:
        """Bytes of memory."""
        return sum(map(len, self.column[2]))

    def frame(self, first: int, previous_end: int, stamp: bytes) -> FrameParts:
        """A frame for a segment before which the log ended at ``previous_end``."""
        return assemble(
            [self.column], count=self.count, producer=0, first=first, previous=previous_end, flags=0, stamp=stamp
        )


def head_rows(rows: list[bytes], rows_max: int) -> list[HeaderRows]:
    """Rows for frames of at most ``rows_max`` each."""
    pages = (rows[start : start + rows_max] for start in range(0, len(rows), rows_max))
    return [HeaderRows(len(page), body_column(page, COMPRESSION)) for page in pages]
