"""Conditions on messages agree with SQLite, in frames with header blocks and in frames without."""

from __future__ import annotations

import random
import sqlite3
import time
import tracemalloc
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
from plait.frame.builder import assemble, body_column, pack_stamp
from plait.frame.columns import TAG_SEPARATOR, Codec, Column
from plait.frame.header_block import REST, TEXT, UNREADABLE, HeaderBlock, HeaderColumn, ends_of
from plait.limits import (
    FILTER_DEPTH_MAX,
    FILTER_LENGTH_MAX,
    FILTER_NODES_MAX,
    FILTER_PART_BYTES,
    FILTER_PART_COUNT,
    FILTER_WILDCARDS_MAX,
)
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
    # SQLite stores NaN as null.
    "price": (0.0, 0.5, 2.0, -1.25, 1000.0, float("nan"), None),
    "vip": (True, False, None),
    "mixed": (0, 1, 2, 5, 0.5, 2.0, 5.0, -1.25, None),
    "id": ((1 << 53) - 1, 1 << 53, (1 << 53) + 1, -(1 << 53) - 1, (1 << 63) - 1, -(1 << 63), 7, 2.0**53, 1e19, None),
}
TEXTS, NUMBERS = ("city", "note"), ("amount", "count", "price", "vip", "mixed")
LARGE = (
    "9007199254740991",
    "9007199254740993",
    "9007199254740992.0",
    "9223372036854775807",
    "-9223372036854775807",
    "-9223372036854775808",
    "9223372036854775808.0",
    "-1e19",
    "id",
    "mixed",
)
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
        match draw.randrange(10):
            case 0:
                return f"{self.number()} {self._operator()} {self.number()}"
            case 1:
                return f"{draw.choice(TEXTS)} {self._operator()} {self._text()}"
            case 2:
                return f"{self.number()} {maybe_not}BETWEEN {self.number()} AND {self.number()}"
            case 3:
                return f"{draw.choice(TEXTS)} {maybe_not}IN ({', '.join(self._text() for _ in range(3))})"
            case 4:
                literals = ", ".join(draw.choice((str(draw.randint(-5, 8)), "0.5", "2.0")) for _ in range(3))
                return f"{draw.choice(NUMBERS)} {maybe_not}IN ({literals})"
            case 5:
                pieces = ("%", "_", "!%", "!_", "B", "S", "5", "a", "b", "ö", "!!", "x")
                pattern = "".join(draw.choice(pieces) for _ in range(draw.randrange(5)))
                return f"{draw.choice(TEXTS)} {maybe_not}LIKE '{pattern}' ESCAPE '!'"
            case 6:
                return f"{draw.choice((*TEXTS, *NUMBERS))} IS {maybe_not}NULL"
            case 7:
                return f"id {self._operator()} {draw.choice(LARGE)}"
            case 8:
                literals = ", ".join(draw.choice(LARGE[:-2]) for _ in range(3))
                between = f"id {maybe_not}BETWEEN {draw.choice(LARGE)} AND {draw.choice(LARGE)}"
                return draw.choice((between, f"id {maybe_not}IN ({literals})"))
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
        # Too large for an integer, but not for a double.
        ("amount * 9223372036854775807 > 0", [1]),
    ],
)
def test_a_condition_on_headers(where: str, expected: list[int], copies: int):
    rows = ORDERS * copies
    wanted = [number for number in range(len(rows)) if number % len(ORDERS) in expected]
    assert chosen(where, frame_of(rows)) == wanted


#: Values of one header in neighbouring rows: no frame has a column for all of them.
KINDS: tuple[Any, ...] = (
    *(0, 1, 5, -7, True, 1.5, -0.0, 2.0, float("inf"), float("nan"), "", "x", "5"),
    *((1 << 53) + 1, (1 << 63) - 1, -(1 << 63), 1 << 63, (1 << 64) - 1, None),
)


@pytest.mark.parametrize("values", [KINDS, (5, 1 << 63, (1 << 53) + 1, None), (5, 7.5, (1 << 53) + 1)])
def test_the_result_for_a_row_does_not_depend_on_other_rows(seed: int, values: tuple[Any, ...]):
    draw = random.Random(f"{seed} neighbours")
    conditions = [
        *("a / 2 = 2", "a % 2 = 1", "a = 9007199254740992", "a = 9007199254740993", "a + 1 > a", "a <> a", "a"),
        *("a IN (5, 2.0)", "a NOT IN (1.5, 'x')", "a IS NULL", "-a < 0", "a * b > 0", "a - b IS NULL", "a > b"),
        *("a >= 9223372036854775807", "a BETWEEN b AND 5", "a LIKE '%x'", "a / b = 1", "a % b = 0", "(a = b) + 1 = 2"),
        *("a = b", "NOT a"),
    ]
    for _ in range(5):
        rows = [{name: value for name in "ab" if (value := draw.choice(values)) is not None} for _ in range(20)]
        alone = [frame_of([row]) for row in rows]
        frames = [frame_of(rows), frame_of(rows[:10]), frame_of(rows * 4)]
        for where in conditions:
            expected = {number for number, frame in enumerate(alone) if chosen(where, frame)}
            for frame in frames:
                found = {number % 20 for number in chosen(where, frame)}
                assert found == {number for number in expected if number < frame.count}, where


@pytest.mark.parametrize(
    ("where", "value", "matches"),
    [
        ("a + 0 = 9223372036854775807", (1 << 63) - 1, True),
        ("a + 1 IS NULL", (1 << 63) - 1, True),
        ("a - 1 > 0", (1 << 63) - 100, True),
        ("a = -9223372036854775807", -(1 << 63) + 1, True),
        ("a = -9223372036854775808", -(1 << 63), True),
        ("a IN (-9223372036854775808)", -(1 << 63), True),
        ("a - 1 IS NULL", -(1 << 63), True),
        ("-a IS NULL", -(1 << 63), True),
        ("a / -1 IS NULL", -(1 << 63), True),
        ("a % -1 = 0", -(1 << 63), True),
        ("a * -1 IS NULL", -(1 << 63), True),
        ("a * 49 IS NULL", (1 << 63) // 49 + 1, True),
        ("a * 49 > 0", (1 << 63) // 49, True),
        ("a * 3037000499 > 9223372030926249000", 3037000499, True),
        ("id IN (9007199254740992, 0.5)", None, False),
        ("a IN (9007199254740992, 0.5)", (1 << 53) + 1, False),
        ("a IN (9007199254740992.0)", 1 << 53, True),
        ("a = 9007199254740992.0", (1 << 53) + 1, False),
        ("a > 9007199254740992.0", (1 << 53) + 1, True),
        ("a > 9223372036854775807", 1 << 63, True),
        ("+a = 'x'", "x", True),
        ("'x' NOT BETWEEN a AND 'b'", "a", True),
        ("'x' IN ('x')", 1, True),
        ("a LIKE 'a\nb_'", "a\nb\n", True),
        ("a LIKE 'a'", "a\n", False),
        ("a LIKE 'a.%c%'", "a.bcd", True),
        ("a LIKE '[a]^$_'", "[a]^$\U0001f600", True),
        # NaN is null, as in SQLite.
        *((where, float("nan"), False) for where in ("a", "NOT a", "a = a", "a <> a", "NOT (a > 5)", "a NOT IN (1)")),
        ("a IS NULL", float("nan"), True),
    ],
)
@pytest.mark.parametrize("copies", [1, 64])
def test_a_condition_on_one_value(where: str, value: Any, matches: bool, copies: int):
    rows = [{} if value is None else {"a": value}] * copies
    assert chosen(where, frame_of(rows)) == (list(range(copies)) if matches else [])


def test_products_overflow_exactly(seed: int):
    draw = random.Random(f"{seed} products")
    for _ in range(300):
        a = draw.choice((1, -1)) * draw.randrange(1, 1 << draw.randrange(1, 64))
        b = draw.choice((1, -1)) * ((1 << 63) // abs(a) + draw.choice((-1, 0, 1)))
        row = {"a": max(a, -(1 << 63)), "b": min(max(b, -(1 << 63)), (1 << 63) - 1)}
        fits = -(1 << 63) <= row["a"] * row["b"] < 1 << 63
        assert bool(chosen("a * b IS NOT NULL", frame_of([row]))) == fits, row


def test_a_chain_and_maps_of_many_names_take_memory_for_a_part_of_the_frame_only():
    names = [f"n{number}" for number in range(5_000)]
    maps = build_frame([b""] * 60, producer=1, first=1, headers=[encode(dict.fromkeys(names, 1))] * 60)
    numbers = build_frame([b""] * 100_000, producer=1, first=1, headers=[encode({"a": 1})] * 100_000)
    for parts, where in ((maps, "nope = 1"), (numbers, " AND ".join(["a"] * 100))):
        frame, condition = FrameView(parts.tobytes()), compile_filter(FilterTerms(where=where))
        condition.rows(frame_of([{"a": 1}]))
        tracemalloc.start()
        try:
            condition.rows(frame)
            assert tracemalloc.get_traced_memory()[1] < 4_000_000
        finally:
            tracemalloc.stop()


def test_a_frame_is_examined_in_parts():
    rows = [{"a": "x" * 100, "b": number} for number in range(40_000)]
    frame = FrameView(
        build_frame([b""] * len(rows), producer=1, first=1, headers=[encode(row) for row in rows]).tobytes()
    )
    for where, most in (("b % 2 = 0", FILTER_PART_COUNT), ("a = 'y'", FILTER_PART_BYTES // 100 + 1)):
        condition = compile_filter(FilterTerms(where=where))
        parts = list(condition.parts(frame, 5, 39_000, 10))
        assert [part.first for part in parts] == [5, *(part.last for part in parts[:-1])]
        assert parts[-1].last == 39_000
        assert parts[0].last == 5 + 256
        assert 5_000 < max(part.last - part.first for part in parts) <= most
        whole = condition.rows(frame)
        assert np.array_equal(np.concatenate([part.mask for part in parts]), whole[5:39_000])


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
        ("a = 1 OR b LIKE '50!' ESCAPE '!'", 16, "escape character '!'"),
        ("a IN tags", 0, "only a text"),
        ("a = 1 AND 'a\x1fb' IN tags", 10, "tag"),
        ("'' IN tags", 0, "tag"),
        ("tags = 'x'", 0, "keyword"),
        ("a = 1 OR escape = 1", 9, "keyword"),
        ("a > 9223372036854775808", 4, "is over"),
        ("a > 5 - 9223372036854775808", 8, "is over"),
        ("9223372036854775808", 0, "is over"),
        ("NOT " * FILTER_DEPTH_MAX + "a", 4 * FILTER_DEPTH_MAX, "FILTER_DEPTH_MAX"),
        (" OR ".join(["a"] * FILTER_NODES_MAX), 5 * (FILTER_NODES_MAX - 1), "FILTER_NODES_MAX"),
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


def test_a_filter_that_is_too_long_is_refused_with_the_place():
    with pytest.raises(InvalidFilter, match="FILTER_LENGTH_MAX") as caught:
        filter_terms("a" * (FILTER_LENGTH_MAX + 1), None)
    assert caught.value.details["position"] == FILTER_LENGTH_MAX


def test_names_have_letters_of_any_alphabet():
    assert chosen("größe = 1 AND ö_1 = 2 AND город = 3", frame_of([{"größe": 1, "ö_1": 2, "город": 3}])) == [0]
    with pytest.raises(InvalidFilter):
        parse("٣a = 1")


def test_a_long_chain_and_many_parentheses_are_not_deep():
    assert parse(" OR ".join(["a = 1"] * 100)).depth == 3
    assert parse("(" * 1000 + "a" + ")" * 1000).depth == 1


@pytest.mark.parametrize(
    ("pattern", "wildcards"),
    [("%x" * 13, 13), ("_%x" * 5 + "___", 13), ("a%b%c", 2), ("%_" * 6 + "y", 12), ("%x", 0), ("_" * 500 + "%", 0)],
)
def test_wildcards_that_multiply_the_states_of_a_pattern_have_a_limit(pattern: str, wildcards: int):
    where = f"a LIKE '{pattern}'"
    if wildcards > FILTER_WILDCARDS_MAX:
        with pytest.raises(InvalidFilter, match="FILTER_WILDCARDS_MAX"):
            parse(where)
    else:
        assert parse(where).wildcards == wildcards
        with pytest.raises(InvalidFilter, match="FILTER_WILDCARDS_MAX.*character 24" if len(where) == 17 else "FILTER"):
            parse(" OR ".join([where] * (FILTER_WILDCARDS_MAX // max(wildcards, 1) + 600)))


@pytest.mark.parametrize(
    "pattern", ["%x" * 5 + "y%y", "%x__________z", "%_x_x_x_x_x_", "x" * 4000 + "%", "%" + "x" * 4000]
)
def test_a_pattern_takes_little_time_for_each_byte(pattern: str):
    draw = random.Random(1)
    text = "".join(draw.choice("xy") for _ in range(65_000))
    condition = compile_filter(FilterTerms(where=f"a LIKE '{pattern}'"))
    frame = frame_of([{"a": text}])
    condition.rows(frame)
    began = time.process_time()
    condition.rows(frame)
    # 3 to 10 ms; without a limit of wildcards it would be seconds.
    assert time.process_time() - began < 0.1


@pytest.mark.parametrize(
    ("where", "tags", "text"),
    [
        ("", None, "not a condition"),
        (5, None, "not a condition"),
        ("a = '\ud800'", None, "UTF-8 does not have.*character 6"),
        (None, ["bad\x1ftag"], "tag"),
        (None, [5], "tag 5"),
        (None, 5, "tags=5 is neither"),
        (None, b"new", "neither"),
        (None, TagFilter(any=5), "any=5 is neither"),  # type: ignore[arg-type]
        (None, TagFilter(none=None), "none=None is neither"),  # type: ignore[arg-type]
        # An empty list may be the result of a search for tags.
        (None, [], "names no tag"),
        ("a = 1", TagFilter(), "names no tag"),
    ],
)
def test_wrong_arguments_are_refused(where: Any, tags: Any, text: str):
    with pytest.raises(InvalidArgument, match=text):
        filter_terms(where, tags)


def test_a_text_is_one_tag():
    assert filter_terms(None, "new") == FilterTerms(TagFilter(any=("new",)))
    assert filter_terms(None, TagFilter(all="new", none="old")) == FilterTerms(  # type: ignore[arg-type]
        TagFilter(all=("new",), none=("old",))
    )


def test_headers_in_a_column_win_and_maps_that_do_not_decode_are_null():
    """Only a client that is not Plait's makes such blocks."""
    city = HeaderColumn("city", TEXT, None, np.array([0, 3, 6], np.int32), memoryview(b"BJSSHA"))
    for maps, shown in (
        ([encode({"city": "CAN", "a": 1})] * 2, {"city": "BJS", "a": 1}),
        ([b"\xff"] * 2, {"city": "BJS", UNREADABLE: "ff"}),
    ):
        rest = HeaderColumn("", REST, None, ends_of(maps), memoryview(b"".join(maps)))
        block = HeaderBlock(2, [city], rest).tobytes()
        parts = assemble(
            [body_column([b"x"] * 2), (Column.HEADERS, Codec.RAW, [block])],
            count=2,
            producer=1,
            first=1,
            previous=0,
            flags=0,
        )
        frame = FrameView(parts.tobytes())
        found = frame.header_block()
        assert found is not None
        assert found.map(0) == found.maps()[0] == shown
        assert chosen("city = 'BJS'", frame) == [0]
        assert chosen("city = 'CAN'", frame) == []
        assert chosen("a = 1", frame) == ([0, 1] if "a" in shown else [])
        assert chosen(f'"{UNREADABLE}" IS NOT NULL', frame) == []
