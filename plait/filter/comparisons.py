"""Comparisons: of numbers, which are exact also between integers and doubles, of text, with IN and with LIKE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.filter.patterns import Form, Pattern
from plait.filter.values import Number, Values, arrow, as_flags, both, either, text_array, truth

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
_MIRRORED: Final = {"=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
#: Every integer up to this is a double.
_EXACT_MAX: Final = 1 << 53
_WHOLE_END: Final = float(1 << 63)


def compare(op: str, left: Values, right: Values) -> Values:
    """The rows for which ``left op right`` is true; unknown for values of different types."""
    number = _NUMBERS[op]
    true: Any = False
    known: Any = False
    if left.whole is not None and right.whole is not None:
        known = both(left.whole.valid, right.whole.valid)
        true = both(number(left.whole.data, right.whole.data), known)
    if left.text is not None and right.text is not None:
        valid = both(left.text.valid, right.text.valid)
        known = either(known, valid)
        true = either(true, both(_texts(op, left.text.data, right.text.data), valid))
    if left.real is None and right.real is None:
        return truth(true, known)
    for a, b, compared in (
        (left.real, right.real, number),
        (left.whole, right.real, partial(_whole_with_real, op)),
        (right.whole, left.real, partial(_whole_with_real, _MIRRORED[op])),
    ):
        if a is not None and b is not None:
            valid = both(a.valid, b.valid)
            known = either(known, valid)
            true = either(true, both(compared(a.data, b.data), valid))
    return truth(true, known)


def _texts(op: str, left: pa.Array | str, right: pa.Array | str) -> Any:
    import pyarrow.compute as pc

    return as_flags(pc.call_function(_TEXTS[op], [arrow(left), arrow(right)]))


def _whole_with_real(op: str, whole: Any, real: Any) -> Any:
    """Compare integers with doubles without rounding the integers."""
    if np.ndim(whole) == 0 and abs(int(whole)) <= _EXACT_MAX:
        return _NUMBERS[op](float(whole), real)
    floor = np.floor(real)
    inside = np.logical_and(floor >= -_WHOLE_END, floor < _WHOLE_END)
    below = np.where(inside, floor, 0.0).astype(np.int64)
    same = np.logical_and(inside, np.equal(whole, below))
    equal = np.logical_and(same, np.equal(real, floor))
    less = np.where(inside, np.less(whole, below) | (same & np.greater(real, floor)), np.greater(real, 0))
    if op in ("=", "!="):
        return equal if op == "=" else np.logical_not(equal)
    if op in ("<", ">="):
        return less if op == "<" else np.logical_not(less)
    at_most = np.logical_or(less, equal)
    return at_most if op == "<=" else np.logical_not(at_most)


class Literals(NamedTuple):
    """The literals of IN, prepared for each kind of value that may equal them."""

    texts: pa.Array
    wholes: npt.NDArray[np.int64]
    reals: npt.NDArray[np.float64]
    #: Whether there are literals of this type.
    has_text: bool
    has_number: bool

    @classmethod
    def of(cls, literals: Sequence[str | int | float]) -> Literals:
        texts = [each for each in literals if isinstance(each, str)]
        wholes = [each for each in literals if isinstance(each, int)]
        reals = [each for each in literals if isinstance(each, float)]
        as_wholes = [int(each) for each in reals if each.is_integer() and abs(each) < _WHOLE_END]
        as_reals = [float(each) for each in wholes if int(float(each)) == each]
        return cls(
            text_array(texts),
            np.array(wholes + as_wholes, np.int64),
            np.array(reals + as_reals, np.float64),
            bool(texts),
            bool(wholes or reals),
        )


def among(value: Values, members: Literals) -> Values:
    """IN. A literal of the other type compares as unknown, so a row that no literal equals is then not known."""
    true: Any = False
    known: Any = False
    for number, literals in ((value.whole, members.wholes), (value.real, members.reals)):
        if number is not None:
            has = both(_in_numbers(number, literals), number.valid)
            true = either(true, has)
            known = either(known, has if members.has_text else number.valid)
    if value.text is not None:
        import pyarrow.compute as pc

        found = as_flags(pc.is_in(arrow(value.text.data), value_set=members.texts))
        has = both(found, value.text.valid)
        true = either(true, has)
        known = either(known, has if members.has_number else value.text.valid)
    return truth(true, known)


def _in_numbers(number: Number, literals: npt.NDArray[Any]) -> Any:
    return np.isin(np.asarray(number.data, literals.dtype), literals) if len(literals) else False


def like(value: Values, pattern: Pattern) -> Values:
    """LIKE: unknown for numbers."""
    if value.text is None:
        return Values()
    import pyarrow.compute as pc

    functions: dict[Form, Any] = {
        Form.START: pc.starts_with,
        Form.END: pc.ends_with,
        Form.PART: pc.match_substring,
        Form.REGEX: pc.match_substring_regex,
    }
    data, valid = value.text
    if pattern.form is Form.WHOLE:
        true = as_flags(pc.equal(arrow(data), arrow(pattern.text)))
    else:
        true = as_flags(functions[pattern.form](arrow(data), pattern=pattern.text))
    return truth(both(true, valid), valid)
