"""The index of a segment against a search of all its frames, and index files that are damaged, cut or another's."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import DamageError
from plait.frame.builder import build_frame, pack_stamp
from plait.frame.coalesce import coalesce
from plait.frame.view import FrameView
from plait.storage.index import index_builder
from plait.storage.index.index_builder import IndexBuilder
from plait.storage.index.index_file import IndexFile, base_of, index_path
from plait.storage.index.index_part import IndexPart
from plait.testing.simulated_disk import SimulatedDisk

BASE = 1 << 20
PRODUCERS = (3, 4, 1 << 63)
#: Some hashes share their upper half, which is all that an index has of them.
HASHES = [(0xABCD_EF01 << 32) + low for low in range(4)] + [
    number * 0x9E37_79B9_7F4A_7C15 % (1 << 64) for number in range(20)
]


class Segment(NamedTuple):
    """The bytes of a segment, and its frames by position."""

    data: bytes
    frames: dict[int, FrameView]

    @property
    def end(self) -> int:
        return BASE + len(self.data)

    def keys(self, key_hash: int, wide: bool = False) -> set[int]:
        """The positions of frames with a key hash; ``wide``: with the same upper half."""
        shift = np.uint64(32 if wide else 0)
        found = set()
        for position, frame in self.frames.items():
            hashes = frame.key_hashes()
            if hashes is not None and bool((hashes >> shift == np.uint64(key_hash) >> shift).any()):
                found.add(position)
        return found

    def ids(self, producer: int, number: int) -> set[int]:
        return {
            position
            for position, frame in self.frames.items()
            if (producer, number) in zip(*(each.tolist() for each in frame.message_ids()), strict=True)
        }


def segment_of(seed: int, count: int) -> Segment:
    """Random frames: with and without keys, of one or of several producers, with sequences of any size."""
    rng = random.Random(seed)
    numbers = {producer: rng.choice([1, 1 << 20, (1 << 32) - 40, 1 << 40]) for producer in PRODUCERS}
    data, frames, base = bytearray(), {}, 0

    def one(keyed: bool) -> FrameView:
        rows = rng.choice([1, 1, 2, 5, 40])
        producer = rng.choice(PRODUCERS)
        hashes = np.array(rng.choices(HASHES, k=rows), np.uint64) if keyed else None
        if rng.random() < 0.05:
            numbers[producer] += rng.choice([1, 1 << 31, 1 << 33])
        first = numbers[producer]
        numbers[producer] += rows
        keys = [b"key"] * rows if keyed else None
        frame = build_frame([b"body"] * rows, producer=producer, first=first, keys=keys, key_hashes=hashes)
        return FrameView(frame.tobytes())

    for _ in range(count):
        keyed = rng.random() < 0.7
        if rng.random() < 0.3:
            buffer = bytearray(coalesce([one(keyed) for _ in range(rng.randrange(2, 5))]).tobytes())
        else:
            buffer = bytearray(one(keyed).buffer)
        partition = rng.choice([0, 1, 2])
        buffer[44:80] = pack_stamp(partition, base, 1_700_000_000_000_000, 0, 1)
        base += FrameView(buffer).count
        if partition:
            frames[len(data)] = FrameView(bytes(buffer)).verify()
        data += buffer
    return Segment(bytes(data), frames)


def check(parts: tuple[IndexPart, ...], segment: Segment) -> None:
    """Every key and message is found where it is, and keys nowhere else but where their upper half is."""
    for key_hash in {*HASHES, 7 << 32}:
        found = [part.key(key_hash, 0, 1 << 30) for part in parts]
        assert all(whole for _, whole in found)
        positions = [position for each, _ in found for position in each.tolist()]
        assert len(positions) == len(set(positions))
        assert set(positions) == segment.keys(key_hash, wide=True) >= segment.keys(key_hash)
    for frame in segment.frames.values():
        producers, numbers = frame.message_ids()
        for producer, number in {(int(producers[i]), int(numbers[i])) for i in (0, -1, len(numbers) // 2)}:
            positions = [position for part in parts for position in part.message_id(producer, number, 1 << 30).tolist()]
            assert segment.ids(producer, number) <= set(positions) <= segment.frames.keys()


def built(disk: SimulatedDisk, segment: Segment, rng: random.Random, *, trusted: int = 0) -> IndexBuilder:
    builder = IndexBuilder(disk, BASE, trusted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_builder, "PART_ENTRIES", rng.choice([5, 60, 1 << 20]))
        while builder.step(memoryview(segment.data), segment.end, frames=rng.randrange(1, 20)):
            if rng.random() < 0.5:
                builder.publish()
        builder.publish()
    return builder


@given(st.integers(0, 1 << 32), st.integers(1, 40), st.booleans())
def test_an_index_finds_what_a_search_of_all_frames_finds(seed: int, count: int, trusted: bool):
    segment, disk = segment_of(seed, count), SimulatedDisk()
    builder = built(disk, segment, random.Random(seed), trusted=0 if trusted else segment.end)
    assert builder.indexed.end == segment.end
    check(builder.indexed.parts, segment)
    assert builder.finish(memoryview(segment.data))
    file = IndexFile(disk, BASE)
    assert file.matches(memoryview(segment.data), BASE, segment.end)
    check(file.parts, segment)
    file.verify()


@given(st.integers(0, 1 << 32), st.integers(0, 1000))
def test_limited_look_ups_continue(seed: int, position: int):
    segment = segment_of(seed, 30)
    (part, *rest) = built(SimulatedDisk(), segment, random.Random(0)).indexed.parts
    wanted = sorted(segment.keys(HASHES[0], wide=True))
    if not rest:
        positions, whole = part.key(HASHES[0], position * 8, 2)
        assert positions.tolist() == [each for each in wanted if each >= position * 8][:2]
        assert whole == (len([each for each in wanted if each >= position * 8]) <= 2)


def finished(segment: Segment, part_entries: int = 40) -> SimulatedDisk:
    disk = SimulatedDisk()
    builder = IndexBuilder(disk, BASE, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_builder, "PART_ENTRIES", part_entries)
        while builder.step(memoryview(segment.data), segment.end):
            pass
        builder.finish(memoryview(segment.data))
    return disk


@given(st.data())
def test_a_changed_or_cut_file_is_refused_or_finds_the_same(data: st.DataObject):
    segment = segment_of(5, 30)
    disk = finished(segment)
    size = len(disk.read(index_path(BASE)))
    if data.draw(st.booleans()):
        bit = data.draw(st.integers(0, 8 * size - 1))
        disk.flip_bit(index_path(BASE), bit // 8, bit % 8)
    else:
        file = disk.open(index_path(BASE))
        file.truncate(data.draw(st.integers(0, size - 1)))
        file.close()
    try:
        index = IndexFile(disk, BASE)
        index.verify()
        check(index.parts, segment)
    except DamageError:
        return
    # The byte was one that an index does not use: padding.
    assert index.matches(memoryview(segment.data), BASE, segment.end)


def test_a_damaged_block_is_found_by_the_look_up_that_reads_it():
    segment = segment_of(5, 30)
    disk = finished(segment, 1 << 20)
    for byte in range(80, 400, 8):
        disk.flip_bit(index_path(BASE), byte, 0)
    with pytest.raises(DamageError, match="block 0"):
        check(IndexFile(disk, BASE).parts, segment)


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_refused(data: bytes):
    disk = SimulatedDisk()
    disk.make_directory("index")
    file = disk.open(index_path(BASE), create=True)
    file.write([data], 0)
    with pytest.raises(DamageError):
        IndexFile(disk, BASE)


def test_an_index_of_another_segment_or_of_other_content_does_not_match():
    segment, other = segment_of(5, 30), segment_of(6, 30)
    index = IndexFile(finished(segment), BASE)
    view = memoryview(segment.data)
    assert index.matches(view, BASE, segment.end)
    assert not index.matches(view, BASE, segment.end + 8)
    assert not index.matches(view, BASE + 8, segment.end)
    changed = bytearray(other.data.ljust(len(segment.data), b"\0")[: len(segment.data)])
    assert not index.matches(memoryview(changed), BASE, segment.end)
    disk = finished(segment)
    disk.rename(index_path(BASE), index_path(BASE + 8))
    with pytest.raises(DamageError, match="has the name of"):
        IndexFile(disk, BASE + 8)


def test_names():
    assert base_of(index_path(17).rpartition("/")[2]) == 17
    assert base_of("x.idx") is base_of("00000000000000000017.idx.new") is None


@pytest.mark.parametrize("hurt", ["prefix", "size", "body", "zeros"])
def test_a_damaged_frame_is_left_out_and_the_others_are_indexed(hurt: str):
    segment = segment_of(9, 30)
    places = sorted(segment.frames)
    hit = places[len(places) // 2]
    data = bytearray(segment.data)
    size = segment.frames[hit].size
    match hurt:
        case "prefix":
            data[hit] ^= 1
        case "size":
            data[hit + 4 : hit + 8] = (1 << 20).to_bytes(4, "little")
        case "body":
            data[hit + size - 9] ^= 1
        case "zeros":
            data[hit : hit + size] = bytes(size)
    rest = Segment(bytes(data), {at: frame for at, frame in segment.frames.items() if at != hit})
    check(built(SimulatedDisk(), rest, random.Random(1), trusted=rest.end).indexed.parts, rest)


def test_a_segment_without_frames_has_no_index():
    builder = IndexBuilder(SimulatedDisk(), BASE, 0)
    assert not builder.step(memoryview(bytes(1 << 16)), BASE + (1 << 16))
    assert not builder.finish(memoryview(bytes(1 << 16)))


def test_an_entry_takes_eight_bytes():
    rows = 100_000
    hashes = np.random.default_rng(1).integers(0, 1 << 63, rows, dtype=np.uint64)
    pieces = np.split(hashes, 100)
    bodies = [b"x"] * 1000
    frames = [
        build_frame(bodies, producer=1, first=1 + 1000 * i, keys=[b"k"] * 1000, key_hashes=each)
        for i, each in enumerate(pieces)
    ]
    for frame in frames:
        frame.stamp_with(pack_stamp(1, 0, 0, 0, 1))
    data = b"".join(frame.tobytes() for frame in frames)
    disk = finished(Segment(data, {}), 1 << 20)
    assert IndexFile(disk, BASE).size / rows < 8.1
