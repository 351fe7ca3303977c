"""This version reads the golden frames, which the first version wrote, and writes the same bytes."""

from __future__ import annotations

import json

import pytest

from plait.frame import FrameView
from plait.frame.arrow import record_batch
from tests.golden.make_frames import COMPRESSED, DIRECTORY, FRAMES, content

NAMES = sorted(path.stem for path in DIRECTORY.glob("*.bin"))


@pytest.mark.parametrize("name", NAMES)
def test_golden_frames_read_as_recorded(name: str):
    expected = json.loads((DIRECTORY / f"{name}.json").read_text())
    frame = FrameView((DIRECTORY / f"{name}.bin").read_bytes()).validate()
    assert content(frame) == expected
    assert record_batch(frame).column("body").to_pylist() == [bytes.fromhex(row["body"]) for row in expected["rows"]]


@pytest.mark.parametrize("name", [name for name in FRAMES if name not in COMPRESSED])
def test_golden_frames_are_written_with_the_same_bytes(name: str):
    assert FRAMES[name]() == (DIRECTORY / f"{name}.bin").read_bytes()


@pytest.mark.parametrize("name", sorted(COMPRESSED))
def test_compressed_frames_are_written_with_the_same_content(name: str):
    written = content(FrameView(FRAMES[name]()).validate())
    golden = content(FrameView((DIRECTORY / f"{name}.bin").read_bytes()))
    for sizes in (written["header"], golden["header"]):
        del sizes["size"], sizes["crc"]
    assert written == golden


def test_every_golden_frame_has_a_maker():
    assert set(FRAMES) == set(NAMES)
