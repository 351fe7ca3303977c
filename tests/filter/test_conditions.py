"""Conditions on messages agree with SQLite, in frames with header blocks and in frames without."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pytest

from plait.errors import InvalidArgument, InvalidFilter
from plait.filter.grammar import parse
from plait.filter.message_filter import compile_filter
from plait.frame import FrameView, build_frame, slice_mask
from plait.frame.builder import pack_stamp
from plait.frame.columns import TAG_SEPARATOR
from plait.limits import FILTER_DEPTH_MAX, FILTER_LENGTH_MAX, FILTER_NODES_MAX
from plait.model.filter_terms import FilterTerms, TagFilter, filter_terms
from tests.frame.samples import small_blocks

encode = msgspec.msgpack.Encoder().encode
NOW = 1_700_000_000_000_000
#: Header name → its values.
COLUMNS: dict[str, tuple[Any, ...]] = {
    "city": ("BJS", "SHA", "größe", "", "50%", "a_b", "b" * 40, None),
    "note": ("BJS", "x", "50%", None),
    "amount": (0, 1, 2, 3, 7, -5, 1000, None),
    "count": (0, 1, -1, 4, None),
    "price": (0.0, 0.5, 2.0, -1.25, 1000.0, None),
    "vip": (True, False, None),
}
TEXTS, NUMBERS = ("city", "note"), ("amount", "count", "price", "vip")
Row = dict[str, Any]


def frame_of(rows: list[Row], keys: list[str] | None = None, tags: list[list[str]] | None = None) -> FrameView:
    with small_blocks(16):
        frame = build_frame(
            [b"body"] * len(rows),
            producer=1,
            first=1,
            headers=[encode(row) if row else b"" for row in rows],
            keys=None if keys is None else [key.encode() for key in keys],
            key_hashes=None if keys is None else np.arange(len(keys), dtype=np.uint64),
            tags=None if tags is None else [_tag_row(each) for each in tags],
            send_time=np.arange(len(rows)) + NOW,
        )
    frame.stamp_with(pack_stamp(1, 0, NOW + 1_000_000, 0, 1))
    return FrameView(frame.tobytes()).validate()


def _tag_row(tags: list[str]) -> bytes:
    return (TAG_SEPARATOR + TAG_SEPARATOR.join(tags) + TAG_SEPARATOR).encode() if tags else b""


def chosen(where: str, frame: FrameView, tags: TagFilter | None = None) -> list[int]:
    return np.flatnonzero(compile_filter(FilterTerms(tags or TagFilter(), where)).rows(frame)).tolist()


class Draw:
    """Draws conditions that mean the same to SQLite."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def row(self) -> Row:
        row = {name: self._draw.choice(values) for name, values in COLUMNS.items()}
        return {name: value for name, value in row.items() if value is not None}

    def condition(self, depth: int = 0) -> str:
        draw = self._draw
        if depth < 3 and draw.random() < 0.5:
            parts = [self.condition(depth + 1) for _ in range(draw.choice((2, 2, 3)))]
            joined = f" {draw.choice(('AND', 'OR'))} ".join(parts)
            return f"({joined})" if draw.random() < 0.8 else f"NOT ({joined})"
        maybe_not = draw.choice(("", "NOT "))
        match draw.randrange(8):
            case 0:
                return f"{self.number()} {self._operator()} {self.number()}"
            case 1:
                return f"{draw.choice(TEXTS)} {self._operator()} {self._text()}"
            case 2:
                return f"{self.number()} {maybe_not}BETWEEN {self.number()} AND {self.number()}"
            case 3:
                return f"{draw.choice(TEXTS)} {maybe_not}IN ({', '.join(self._text() for _ in range(3))})"
            case 4:
                literals = ", ".join(str(draw.randint(-5, 8)) for _ in range(3))
                return f"{draw.choice(NUMBERS)} {maybe_not}IN ({literals})"
            case 5:
                pattern = draw.choice(("%", "B%", "%S", "_JS", "%\u00f6%", "50!%", "a!_b", "", "b%b", "_", "%!%%"))
                return f"{draw.choice(TEXTS)} {maybe_not}LIKE '{pattern}' ESCAPE '!'"
            case 6:
                return f"{draw.choice((*TEXTS, *NUMBERS))} IS {maybe_not}NULL"
        return draw.choice(("vip", "NOT vip", "amount", "TRUE", "count = NULL"))

    def number(self, depth: int = 0) -> str:
        draw = self._draw
        if depth < 2 and draw.random() < 0.4:
            operator = draw.choice("+-*/%")
            # SQLite's remainder of doubles is that of their integer parts; here it is null.
            names = ("amount", "count") if operator == "%" else NUMBERS
            if operator == "%":
                return f"({draw.choice(names)} % {draw.choice(names)})"
            return f"({self.number(depth + 1)} {operator} {self.number(depth + 1)})"
        if draw.random() < 0.3:
            return draw.choice(("0", "1", "2", "-3", "0.5", "2.0", "1e3", "7"))
        return draw.choice(NUMBERS)

    def _operator(self) -> str:
        return self._draw.choice(("=", "<>", "!=", "<", "<=", ">", ">="))

    def _text(self) -> str:
        return self._draw.choice(("'BJS'", "'SHA'", "'größe'", "''", "'x'", "'50%'", "'Z'"))


def sqlite_rows(rows: list[Row]) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA case_sensitive_like = ON")
    names = ", ".join(COLUMNS)
    # No declared types: SQLite then converts nothing when it compares.
    connection.execute(f"CREATE TABLE messages (number, {names})")
    marks = ", ".join("?" * (len(COLUMNS) + 1))
    values = [(number, *(row.get(name) for name in COLUMNS)) for number, row in enumerate(rows)]
    connection.executemany(f"INSERT INTO messages VALUES ({marks})", values)
    yield connection
    connection.close()


@pytest.mark.parametrize("part", range(4))
def test_generated_conditions_choose_the_rows_that_sqlite_chooses(seed: int, part: int):
    draw = Draw(seed + part)
    for count in (3, 20, 40, 15, 60):
        rows = [draw.row() for _ in range(count)]
        frame = frame_of(rows)
        for connection in sqlite_rows(rows):
            for _ in range(500):
                where = draw.condition()
                query = f"SELECT number FROM messages WHERE {where} ORDER BY number"
                expected = [number for (number,) in connection.execute(query)]
                assert chosen(where, frame) == expected, where


ORDERS: list[Row] = [{"city": "BJS", "amount": 5}, {"city": "SHA", "amount": 7.5}, {"amount": "9"}, {}]


@pytest.mark.parametrize("copies", [1, 10])
@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("city = 'BJS'", [0]),
        ("city <> 'BJS'", [1]),
        ("NOT city = 'BJS'", [1]),
        ("city IS NULL", [2, 3]),
        ("amount > 4", [0, 1]),
        # Text is neither less nor greater than a number.
        ("amount > 4 OR amount <= 4", [0, 1]),
        ("amount = '9'", [2]),
        ("amount IS NOT NULL", [0, 1, 2]),
        ("amount + 1 > 0", [0, 1]),
        ("city LIKE '%J%'", [0]),
        ("city LIKE 'bjs'", []),
        ("amount / 0 IS NULL", [0, 1, 2, 3]),
        ("absent = 1", []),
        ("absent IS NULL", [0, 1, 2, 3]),
        ("1 = 1", [0, 1, 2, 3]),
        ("NULL", []),
        ("\"city\" = 'BJS'", [0]),
        ("amount * 9223372036854775807 > 0", [0, 1]),
    ],
)
def test_a_condition_on_headers(where: str, expected: list[int], copies: int):
    rows = ORDERS * copies
    wanted = [number for number in range(len(rows)) if number % len(ORDERS) in expected]
    assert chosen(where, frame_of(rows)) == wanted


def test_keys_times_and_tags():
    keys = ["order-1", "order-2", "x", ""]
    tags = [["new"], ["new", "big"], ["newer"], []]
    frame = frame_of([{}] * 4, keys, tags)
    assert chosen("key LIKE 'order-%'", frame) == [0, 1]
    assert chosen("key IS NULL", frame) == [3]
    assert chosen("'new' IN tags", frame) == [0, 1]
    assert chosen("'new' NOT IN tags AND key IS NOT NULL", frame) == [2]
    assert chosen("", frame, TagFilter(any=("new", "newer"))) == [0, 1, 2]
    assert chosen("", frame, TagFilter(all=("new", "big"))) == [1]
    assert chosen("", frame, TagFilter(none=("big",))) == [0, 2, 3]
    assert chosen("key = 'order-2'", frame, TagFilter(any=("new",))) == [1]
    moment = datetime.fromtimestamp(NOW / 1e6, UTC).isoformat()
    assert chosen(f"send_time > TIMESTAMP '{moment}'", frame) == [1, 2, 3]
    assert chosen(f"store_time - send_time <= 999998 AND send_time >= TIMESTAMP '{moment}'", frame) == [2, 3]
    assert chosen("key = 'order-2'", FrameView(slice_mask(frame, np.array([False, True, True, False])).tobytes())) == [
        0
    ]


def test_headers_that_do_not_decode_are_null():
    frame = FrameView(build_frame([b"a"] * 2, producer=1, first=1, headers=[b"\xff", encode({"a": 1})]).tobytes())
    assert chosen("a IS NULL", frame) == [0]


@pytest.mark.parametrize(
    ("where", "position", "text"),
    [
        ("city = ", 7, "the end"),
        ("city == 'x'", 6, "not expected"),
        ("city = 'x' amount", 11, "'amount'"),
        ("(city = 'x'", 11, "the end"),
        ("city LIKE 'x' ESCAPE '!!'", 21, "one character"),
        ("a > 99999999999999999999", 4, "is over"),
        ("a > TIMESTAMP 'soon'", 14, "ISO 8601"),
        ("a = 'open", 4, "not expected"),
        ("delete(a)", 6, "not expected"),
        ("a; b", 1, "not expected"),
    ],
)
def test_a_mistake_is_refused_with_its_place(where: str, position: int, text: str):
    with pytest.raises(InvalidFilter, match=f"(?s){text}.*character|character.*{text}") as caught:
        parse(where)
    assert caught.value.details["position"] == position


@pytest.mark.parametrize(
    "where",
    [
        "a = 1 OR " * FILTER_LENGTH_MAX + "a = 1",
        "NOT " * (FILTER_DEPTH_MAX + 1) + "a",
        "a IN (" + ", ".join("1" * (FILTER_NODES_MAX + 1)) + ")",
        "a" + "+1" * (FILTER_DEPTH_MAX + 1),
    ],
)
def test_a_condition_has_limits(where: str):
    with pytest.raises(InvalidArgument, match="FILTER_"):
        compile_filter(FilterTerms(where=where))


def test_a_long_chain_and_many_parentheses_are_not_deep():
    assert parse(" OR ".join(["a = 1"] * 100)).depth == 3
    assert parse("(" * 1000 + "a" + ")" * 1000).depth == 1


def test_a_pattern_is_matched_in_linear_time():
    frame = frame_of([{"a": "x" * 20_000}])
    assert chosen("a LIKE '" + "%x" * 100 + "y'", frame) == []


@pytest.mark.parametrize(
    ("where", "tags", "text"),
    [("", None, "not a condition"), (5, None, "not a condition"), (None, ["bad\x1ftag"], "tag")],
)
def test_wrong_arguments_are_refused(where: Any, tags: Any, text: str):
    with pytest.raises(InvalidArgument, match=text):
        filter_terms(where, tags)
