"""Headers as columns compared with one msgpack map for each row: reading two names, and the bytes of both forms."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import msgspec
import pyarrow as pa

from benchmarks.result import Result, median_ratio
from plait.frame.builder import variable_parts
from plait.frame.header_block import HeaderBlock, HeaderMap
from plait.frame.header_packing import pack

PAIRS = 9
CITIES = ("BJS", "SHA", "CAN", "SZX")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HeaderMap).decode


def header_forms(smoke: bool) -> Iterator[Result]:
    """Rows per second in which a text and a number are read from headers with three names."""
    count = 1_000 if smoke else 50_000
    draw = random.Random(7)
    maps = [
        {"city": draw.choice(CITIES), "amount": draw.randrange(10_000), "vip": draw.random() < 0.1}
        for _ in range(count)
    ]
    rows = [_encode(each) for each in maps]
    offsets, data = variable_parts(rows)
    block = pack(offsets, data)
    assert block is not None

    def rate(read: Callable[[], tuple[pa.Array, pa.Array]]) -> float:
        began = time.perf_counter()
        cities, amounts = read()
        seconds = time.perf_counter() - began
        assert len(cities) == len(amounts) == count
        return count / seconds

    def from_block() -> tuple[pa.Array, pa.Array]:
        found = HeaderBlock.parse(memoryview(block), count)
        cities, amounts = found.array("city"), found.array("amount")
        assert cities is not None
        assert amounts is not None
        return cities, amounts

    def from_rows() -> tuple[pa.Array, pa.Array]:
        found = [_decode(row) for row in rows]
        return pa.array([row.get("city") for row in found]), pa.array([row.get("amount") for row in found])

    began = time.perf_counter()
    pack(offsets, data)
    packing = (time.perf_counter() - began) / count * 1e9
    pairs = 1 if smoke else PAIRS
    ratio, mine, theirs = median_ratio(lambda: rate(from_block), lambda: rate(from_rows), pairs)
    details = {"columns": mine, "maps": theirs, "nanoseconds to pack a row": packing}
    yield Result("two header names read: columns / maps", ratio, 10, details=details)
    sizes = {"columns": len(block), "maps": len(data)}
    yield Result("bytes of headers: columns / maps", len(block) / len(data), 0.75, at_most=True, details=sizes)
