"""Every changed bit of a frame is detected."""

from __future__ import annotations

import numpy as np
import pytest

from plait.errors import FrameError
from plait.frame import FrameView, build_frame, coalesce, slice_mask, slice_rows
from tests.frame.samples import Draft, full_draft, with_column


def frames() -> dict[str, bytes]:
    several = [Draft([b"a" * i], send_time=i, producer=i).view() for i in range(1, 5)]
    return {
        "one row": build_frame([b"hello"], producer=1, first=1).tobytes(),
        "all columns": full_draft(6).build().tobytes(),
        "zstd": full_draft(9, "zstd").build().tobytes(),
        "lz4": full_draft(9, "lz4").build().tobytes(),
        "joined": coalesce(several).tobytes(),
        "range": slice_rows(full_draft(9).view(), 2, 7).tobytes(),
        "mask": slice_mask(full_draft(9, "zstd").view(), np.arange(9) % 2 == 0).tobytes(),
        "newer": with_column(full_draft(2).build(), 28, 9, b"newer").tobytes(),
    }


@pytest.mark.parametrize("name", frames())
def test_every_single_bit_flip_is_detected(name: str):
    frame = frames()[name]
    FrameView(frame).verify()
    # A larger size must be detected even if more bytes follow the frame.
    buffer = bytearray(frame + frame + b"\0" * 64)
    for bit in range(8 * len(frame)):
        buffer[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            FrameView(buffer).verify()
        buffer[bit // 8] ^= 1 << bit % 8
    FrameView(buffer).verify()


def test_every_cut_is_detected():
    frame = full_draft(6).build().tobytes()
    for size in range(len(frame)):
        with pytest.raises(FrameError):
            FrameView(frame[:size])


def test_a_damaged_stamp_is_distinguished_from_a_damaged_frame():
    damaged = bytearray(full_draft(6).build().tobytes())
    damaged[50] ^= 4
    with pytest.raises(FrameError, match="stamp checksum"):
        FrameView(damaged).verify_stamp()
    with pytest.raises(FrameError, match="stamp checksum"):
        FrameView(damaged).verify()
    damaged[50] ^= 4
    damaged[-1] ^= 4
    FrameView(damaged).verify_stamp()
    with pytest.raises(FrameError, match="frame checksum"):
        FrameView(damaged).verify()
