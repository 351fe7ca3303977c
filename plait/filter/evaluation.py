"""Evaluates conditions on whole columns, with the three-valued logic of SQL.

A value is text or a number in each row; bools are the numbers 1 and 0. Operations on values of different types, on
null, with an integer overflow or with a division by zero give null (unknown), and a row is wanted only if the whole
condition is true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.filter.grammar import Term

#: True, or one flag for each row.
Flags = npt.NDArray[np.bool_] | bool

_INT64_LIMIT: Final = float(1 << 63)


class Text(NamedTuple):
    """Text by row, or one text for all rows; and which rows have one."""

    data: pa.Array | str
    valid: Flags


class Number(NamedTuple):
    """int64 or double by row, or one number for all rows; and which rows have one."""

    data: npt.NDArray[Any] | int | float
    valid: Flags


class Values(NamedTuple):
    """The value of each row: text, a number, or null. No row has both."""

    text: Text | None = None
    number: Number | None = None


class Fields(Protocol):
    """The fields of the rows that are evaluated."""

    def field(self, name: str) -> Values: ...

    def header(self, name: str) -> Values: ...

    def tagged(self, tag: str) -> Flags: ...


def evaluate(node: Term, fields: Fields) -> Values:
    """The value of a condition or of a part of it, by row."""
    match node.op:
        case "header":
            return fields.header(node.value)
        case "field":
            return fields.field(node.value)
        case "text":
            return Values(text=Text(node.value, True))
        case "number":
            return Values(number=Number(node.value, True))
        case "null":
            return Values()
        case "tagged":
            return _truth(fields.tagged(node.value), True)
        case "and" | "or":
            return _junction(node.op, [_condition(evaluate(part, fields)) for part in node.parts])
        case "not":
            true, known = _condition(evaluate(node.parts[0], fields))
            return _truth(np.logical_not(true) & known, known)
        case "is null":
            value = evaluate(node.parts[0], fields)
            return _truth(np.logical_not(_any(part.valid for part in value if part is not None)), True)
        case "in":
            value, *literals = [evaluate(part, fields) for part in node.parts]
            return _among(value, literals)
        case "like":
            return _like(evaluate(node.parts[0], fields), node.value)
        case "negate":
            return _arithmetic("-", Values(number=Number(0, True)), evaluate(node.parts[0], fields))
        case "plus":
            return Values(number=evaluate(node.parts[0], fields).number)
    left, right = (evaluate(part, fields) for part in node.parts)
    if node.op in _ARITHMETIC:
        return _arithmetic(node.op, left, right)
    return _compare(node.op, left, right)


def wanted(node: Term, fields: Fields, count: int) -> npt.NDArray[np.bool_]:
    """The rows for which the condition is true."""
    true, known = _condition(evaluate(node, fields))
    return np.broadcast_to(np.logical_and(true, known), (count,))


def _truth(true: Any, known: Any) -> Values:
    return Values(number=Number(true, known))


def _any(flags: Any) -> Any:
    found: Any = False
    for each in flags:
        found = np.logical_or(found, each)
    return found


def _condition(value: Values) -> tuple[Any, Any]:
    """(true, known) of a value that is used as a condition: a number is true unless it is 0."""
    if value.number is None:
        return False, False
    data, valid = value.number
    return np.logical_and(np.not_equal(data, 0), valid), valid


def _junction(op: str, parts: Sequence[tuple[Any, Any]]) -> Values:
    """AND and OR: known as soon as one part decides the result, or if all parts are known."""
    trues, knowns = [true for true, _ in parts], [known for _, known in parts]
    all_known = np.logical_and.reduce(np.broadcast_arrays(*knowns))
    if op == "or":
        true = np.logical_or.reduce(np.broadcast_arrays(*trues))
        return _truth(true, np.logical_or(true, all_known))
    true = np.logical_and.reduce(np.broadcast_arrays(*trues))
    false = _any(np.logical_and(known, np.logical_not(each)) for each, known in parts)
    return _truth(true, np.logical_or(all_known, false))


# --- comparisons ----------------------------------------------------------------------------------

_NUMBERS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "=": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}
_TEXTS: Final = {
    "=": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}


def _compare(op: str, left: Values, right: Values) -> Values:
    true: Any = False
    known: Any = False
    if left.number is not None and right.number is not None:
        known = np.logical_and(left.number.valid, right.number.valid)
        true = np.logical_and(_NUMBERS[op](left.number.data, right.number.data), known)
    if left.text is not None and right.text is not None:
        both = np.logical_and(left.text.valid, right.text.valid)
        true = np.logical_or(true, np.logical_and(_texts_compared(op, left.text.data, right.text.data), both))
        known = np.logical_or(known, both)
    return _truth(true, known)


def _texts_compared(op: str, left: pa.Array | str, right: pa.Array | str) -> Any:
    import pyarrow.compute as pc

    found = pc.call_function(_TEXTS[op], [_scalar(left), _scalar(right)])
    return found.as_py() if isinstance(found, pa.Scalar) else _flags(found)


def _scalar(text: pa.Array | str) -> Any:
    return pa.scalar(text) if isinstance(text, str) else text


def _flags(found: pa.BooleanArray) -> npt.NDArray[np.bool_]:
    flags: npt.NDArray[np.bool_] = found.fill_null(False).to_numpy(zero_copy_only=False)
    return flags


def _among(value: Values, literals: Sequence[Values]) -> Values:
    true: Any = False
    known: Any = False
    texts = [each.text.data for each in literals if each.text is not None]
    numbers = [each.number.data for each in literals if each.number is not None]
    # A literal of the other type compares as unknown, so a row that no literal equals is then not known.
    if value.number is not None:
        found = np.isin(value.number.data, np.array(numbers)) if numbers else np.False_
        true = np.logical_and(found, value.number.valid)
        known = true if texts else value.number.valid
    if value.text is not None:
        has = np.logical_and(_in_texts(value.text.data, texts), value.text.valid)
        true = np.logical_or(true, has)
        known = np.logical_or(known, has if numbers else value.text.valid)
    return _truth(true, known)


def _in_texts(data: pa.Array | str, texts: Sequence[Any]) -> Any:
    if isinstance(data, str):
        return data in texts
    import pyarrow.compute as pc

    return _flags(pc.is_in(data, value_set=pa.array(texts, pa.string())))


def _like(value: Values, pattern: str) -> Values:
    if value.text is None:
        return Values()
    import pyarrow.compute as pc

    data, valid = value.text
    # Arrow's regular expressions (RE2) match in linear time, without backtracking.
    found = pc.match_substring_regex(_scalar(data), pattern)
    true = found.as_py() if isinstance(found, pa.Scalar) else _flags(found)
    return _truth(np.logical_and(true, valid), valid)


# --- arithmetic -----------------------------------------------------------------------------------

_ARITHMETIC: Final = ("+", "-", "*", "/", "%")


def _arithmetic(op: str, left: Values, right: Values) -> Values:
    if left.number is None or right.number is None:
        return Values()
    a, b = np.asarray(left.number.data), np.asarray(right.number.data)
    valid: Any = np.logical_and(left.number.valid, right.number.valid)
    if a.dtype == bool or b.dtype == bool:
        a, b = a.astype(np.int64) if a.dtype == bool else a, b.astype(np.int64) if b.dtype == bool else b
    whole = a.dtype.kind == "i" and b.dtype.kind == "i"
    with np.errstate(all="ignore"):
        if op in ("/", "%"):
            valid = np.logical_and(valid, b != 0)
            b = np.where(b == 0, 1, b)
        if not whole:
            if op == "%":
                # The remainder is defined for integers only.
                return Values()
            result: Any = _FLOATS[op](a.astype(np.float64), b.astype(np.float64))
            return Values(number=Number(result, np.logical_and(valid, np.isfinite(result))))
        if op in ("/", "%"):
            # Division truncates towards zero, and the remainder has the sign of the dividend.
            result = np.fmod(a, b) if op == "%" else (a - np.fmod(a, b)) // b
            return Values(number=Number(result, valid))
        near = _FLOATS[op](a.astype(np.float64), b.astype(np.float64))
        result = _FLOATS[op](a, b)
        return Values(number=Number(result, np.logical_and(valid, np.abs(near) < _INT64_LIMIT)))


_FLOATS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
}
