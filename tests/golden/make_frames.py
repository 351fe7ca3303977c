"""Writes the golden frames: ``python -m tests.golden.make_frames``.

An existing file is never written again, because logs in use have the same frames. For a new file, add an entry to
``FRAMES``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from plait.frame import FrameView, coalesce, slice_mask, slice_rows
from plait.frame.builder import pack_stamp
from plait.frame.header import FLAG_UNSEQUENCED
from tests.frame.samples import NOW, Draft, full_draft, rows_of, with_column

DIRECTORY = Path(__file__).parent / "frames"


def _coalesced() -> bytes:
    parts = [
        Draft(
            [b"from %d, %d" % (producer, row) for row in range(count)],
            keys=[b"order-%d" % row for row in range(count)],
            key_hashes=[producer << 32 | row for row in range(count)],
            send_time=NOW + producer,
            producer=producer,
            first=10 * producer,
            previous=10 * producer - 1,
        ).view()
        for producer, count in ((1, 1), (2, 3), (3, 1))
    ]
    joined = coalesce(parts)
    joined.stamp_with(pack_stamp(5, 700, NOW, 8192, 4))
    return joined.tobytes()


#: Name → the bytes of the frame, as this version builds it.
FRAMES: dict[str, Callable[[], bytes]] = {
    "plain": lambda: Draft([b"hello", b"", b"\x00\xff"], base=41).build().tobytes(),
    "all_columns": lambda: full_draft(7).build().tobytes(),
    "const_send_time": lambda: Draft([b"a", b"b"], send_time=NOW, base=9).build().tobytes(),
    "unsequenced": lambda: Draft([b"fire and forget"], flags=FLAG_UNSEQUENCED).build().tobytes(),
    "zstd": lambda: full_draft(12, "zstd").build().tobytes(),
    "lz4": lambda: full_draft(12, "lz4").build().tobytes(),
    "coalesced": _coalesced,
    "sliced": lambda: slice_rows(full_draft(9).view(), 2, 6).tobytes(),
    "masked": lambda: slice_mask(full_draft(9).view(), np.arange(9) % 3 == 1).tobytes(),
    "coalesced_sliced": lambda: slice_rows(FrameView(_coalesced()), 2, 5).tobytes(),
    "coalesced_masked": lambda: slice_mask(FrameView(_coalesced()), np.arange(5) % 2 == 0).tobytes(),
    "zstd_sliced": lambda: slice_rows(full_draft(12, "zstd").view(), 3, 8).tobytes(),
    "lz4_masked": lambda: slice_mask(full_draft(12, "lz4").view(), np.arange(12) % 4 == 1).tobytes(),
    "newer_column": lambda: with_column(full_draft(3).build(), 29, 0, b"a column of the future").tobytes(),
}
#: Frames whose bytes depend on the version of the compressor: only their content is compared.
COMPRESSED = {"zstd", "lz4", "zstd_sliced", "lz4_masked"}


def content(frame: FrameView) -> dict[str, Any]:
    """The content of a frame for JSON; bytes are hexadecimal digits."""
    header = {
        name: getattr(frame, name)
        for name in (
            "version", "flags", "size", "count", "column_bits", "producer", "first", "previous", "crc",
            "partition", "base", "store_time", "durable", "epoch", "stamp_crc", "end",
        )
    }  # fmt: skip
    rows = [
        {name: value.hex() if isinstance(value, bytes) else value for name, value in asdict(row).items()}
        for row in rows_of(frame)
    ]
    return {"header": header, "runs": [list(run) for run in frame.runs().tolist()], "rows": rows}


def main() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    for name, make in FRAMES.items():
        path = DIRECTORY / f"{name}.bin"
        if path.exists():
            print(f"{path.name}: frozen")
            continue
        frame = make()
        path.write_bytes(frame)
        text = json.dumps(content(FrameView(frame).validate()), indent=1)
        path.with_suffix(".json").write_text(text + "\n")
        print(f"{path.name}: {len(frame)} bytes")


if __name__ == "__main__":
    main()
