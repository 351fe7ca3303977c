"""The frame: a batch of rows stored as columns; the unit on the wire, in the logs and in the Spark source.

``build_frame`` makes a frame, ``FrameView`` reads it in place, ``slice_rows`` and ``slice_mask`` cut it without
re-encoding, and ``coalesce`` joins small frames. docs/formats.md describes the bytes.
"""

from plait.frame.builder import FrameParts, build_frame
from plait.frame.coalesce import can_coalesce, coalesce
from plait.frame.columns import Codec, Column
from plait.frame.header import HEADER_SIZE
from plait.frame.slicing import slice_mask, slice_rows
from plait.frame.view import FrameView, frames_in

__all__ = [
    "HEADER_SIZE",
    "Codec",
    "Column",
    "FrameParts",
    "FrameView",
    "build_frame",
    "can_coalesce",
    "coalesce",
    "frames_in",
    "slice_mask",
    "slice_rows",
]
