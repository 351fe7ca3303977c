"""Generated headers, and filters as Spark pushes them down: a filtered read gives the rows of an unfiltered one."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from plait.storage.disk import RealDisk
from tests.filter.test_conditions import Draw
from tests.frame.samples import small_blocks
from tests.spark.support import batch_reader, rows_of
from tests.support.broker_node import Node, Producer

#: Besides those of ``Draw``: values whose types and limits differ from row to row.
MIXED = (
    *(None, None, "", "BJS", "größe 50%", "5", "true", 0, 5, -7, True, False, 1.5, 5.0, -0.0, float("nan")),
    *(float("inf"), (1 << 53) + 1, (1 << 63) - 1, -(1 << 63), 1 << 63, (1 << 64) - 1, float(1 << 53)),
)
TAGS = ("new", "big", "größer", "newer")
HEADERS = (
    "city:string, mixed:string, amount:bigint, id:long, any:bigint, price:double, vip:boolean, a b:double, x:string"
)
KINDS = dict.fromkeys(("city", "mixed", "x"), "string") | dict.fromkeys(("amount", "id", "any"), "bigint")
KINDS |= {"price": "double", "a b": "double", "vip": "boolean"}


def drawn_rows(draw: Draw, chance: random.Random, count: int, *, many_names: bool) -> list[dict[str, Any]]:
    """The headers of messages; with ``many_names`` some have no column in a frame."""
    rows = []
    for _ in range(count):
        row = draw.row() | {name: v for name in ("any", "a b") if (v := chance.choice(MIXED)) is not None}
        if many_names:
            row |= {f"n{chance.randrange(90)}": chance.choice((1, "x"))}
        rows.append(row if chance.random() < 0.9 else {})
    return rows


OPERATORS: dict[type[Filter], Callable[[Any, Any], bool]] = {
    EqualTo: lambda a, b: a == b,
    GreaterThan: lambda a, b: a > b,
    GreaterThanOrEqual: lambda a, b: a >= b,
    LessThan: lambda a, b: a < b,
    LessThanOrEqual: lambda a, b: a <= b,
    StringStartsWith: lambda a, b: a.startswith(b),
    StringEndsWith: lambda a, b: a.endswith(b),
    StringContains: lambda a, b: b in a,
    In: lambda a, b: a in b,
}


def holds(row: dict[str, Any], pushed: Any) -> bool | None:
    """What Spark says of a row; None: unknown."""
    if isinstance(pushed, Not):
        inner = holds(row, pushed.child)
        return None if inner is None else not inner
    value = row[pushed.attribute[0]]
    if isinstance(pushed, IsNull | IsNotNull):
        return (value is None) == isinstance(pushed, IsNull)
    if isinstance(pushed, EqualNullSafe):
        return bool(value == pushed.value)
    return None if value is None else OPERATORS[type(pushed)](value, pushed.value)


class Pushed:
    """Draws filters as Spark pushes them."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(f"{seed} pushed")

    def value(self, kind: str) -> Any:
        draw = self._draw
        if kind == "string":
            return draw.choice(("BJS", "B", "größe", "", "50%", "a_b", "'", "!", "S"))
        if kind == "boolean":
            return draw.random() < 0.5
        if kind == "bigint":
            return draw.choice((0, 1, 5, -7, 1000, (1 << 63) - 1, -(1 << 63), (1 << 53) + 1))
        return draw.choice((0.0, 0.5, 5.0, -1.25, float(1 << 53), 1e300, float("inf"), -0.0, 1e-7))

    def filter(self) -> Filter:
        draw = self._draw
        name, kind = draw.choice([*((f"header_{name}", kind) for name, kind in KINDS.items()), ("key", "string")])
        attribute = (name,)
        if draw.random() < 0.25:
            return draw.choice((IsNull, IsNotNull))(attribute)
        kinds = [EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual, In]
        kinds += [StringStartsWith, StringEndsWith, StringContains] if kind == "string" else []
        chosen: Any = draw.choice(kinds)
        value: Any = tuple(self.value(kind) for _ in range(3)) if chosen is In else self.value(kind)
        if chosen is EqualNullSafe and draw.random() < 0.3:
            value = None
        found: Filter = chosen(attribute, value)
        return Not(found) if draw.random() < 0.3 else found


def compare_pushed(seed: int, count: int, **place: Any) -> int:
    """Compare ``count`` filtered reads with an unfiltered one; returns how many rows the source left out."""
    options = {"columns": "body,key", "headers": HEADERS, **place}
    every, draw = rows_of(batch_reader(**options)), Pushed(seed)
    skipped = 0
    for _ in range(count):
        pushed = [draw.filter() for _ in range(2)]
        reader = batch_reader(**options)
        assert list(reader.pushFilters(pushed)) == pushed
        found = rows_of(reader)
        expected = [row for row in every if all(holds(row, each) is True for each in pushed)]
        # Spark applies the filters to the rows that the source reads.
        assert [row for row in found if all(holds(row, each) is True for each in pushed)] == expected, pushed
        skipped += len(every) - len(found)
    return skipped


def check_pushed_filters(seed: int) -> None:
    """Draw messages and filters from a seed, and compare reads of the log files."""
    chance = random.Random(f"{seed} messages")
    rows = drawn_rows(Draw(seed), chance, 80, many_names=chance.random() < 0.5)
    encode = msgspec.msgpack.Encoder().encode
    with tempfile.TemporaryDirectory() as directory, small_blocks(16):
        node, producer = Node(RealDisk(Path(directory)), message_segment_size=1 << 20), Producer(5)
        for start in range(0, len(rows), 40):
            part = rows[start : start + 40]
            sent = [b"%d" % number for number in range(start, start + len(part))]
            node.submit(producer.frame("orders", *sent, headers=[encode(row) if row else b"" for row in part]))
            node.turn()
        node.broker.stop()
        compare_pushed(seed, 40, path=directory)
