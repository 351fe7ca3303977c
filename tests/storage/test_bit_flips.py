"""Every single flipped bit of a 4 KiB log is detected, or is in unused space."""

from __future__ import annotations

from plait.storage.logs.recovery import LogScan
from plait.storage.logs.segment import segment_name
from tests.storage.frames import DIRECTORY, SEGMENT_SIZE, open_log, some_bodies, written

PATH = f"{DIRECTORY}/{segment_name(0)}"


def test_every_flipped_bit_is_detected_or_in_unused_space():
    bodies = [body for size in (20, 150, 300, 500, 90) for body in some_bodies(2, size, seed=size)]
    disk, log, offsets = written(bodies)
    assert log.segments[0].size == SEGMENT_SIZE
    assert log.end > 3 * SEGMENT_SIZE // 4
    ends = [*offsets[1:], log.end]
    pristine = disk.read(PATH)
    frames = {start: pristine[start:end] for start, end in zip(offsets, ends, strict=True)}
    file = disk.open(PATH)
    undetected = []
    for position in range(SEGMENT_SIZE):
        hit = next((start for start, end in zip(offsets, ends, strict=True) if start <= position < end), None)
        # Frames before the flipped bit are read as usual.
        begin = log.end if hit is None else hit
        expected = {start: data for start, data in frames.items() if start > begin}
        for bit in range(8):
            file.write([bytes([pristine[position] ^ 1 << bit])], position)
            scan = LogScan(log, begin)
            found = {offset: bytes(frame.buffer) for offset, frame in scan}
            reported = any(damage.offset <= position < damage.offset + damage.size for damage in scan.damages)
            unused = hit is None and position + 80 > SEGMENT_SIZE
            if found != expected or not (reported or unused):
                undetected.append((position, bit))
        file.write([pristine[position : position + 1]], position)
    assert undetected == []
    assert {offset: bytes(frame.buffer) for offset, frame in LogScan(open_log(disk), 0)} == frames
