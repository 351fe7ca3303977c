"""Arithmetic: on integers, whose overflow is null, and on doubles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from plait.filter.values import Number, Values, both, either

_OPERATIONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
}
ARITHMETIC: Final = (*_OPERATIONS, "%")
_LOWEST: Final = -(1 << 63)
#: Products whose double is below this fit an int64 whatever the rounding.
_SURE: Final = float(1 << 62)


def calculate(op: str, left: Values, right: Values) -> Values:
    """``left op right``; null where a value is not a number, and where the result is not one."""
    with np.errstate(all="ignore"):
        whole = None
        if left.whole is not None and right.whole is not None:
            whole = _wholes(op, left.whole, right.whole)
        real = None
        # The remainder is defined for integers only.
        for a, b in ((left.whole, right.real), (left.real, right.whole), (left.real, right.real)):
            if a is not None and b is not None and op != "%":
                real = _joined(real, _reals(op, a, b))
    return Values(whole=whole, real=real)


def _reals(op: str, left: Number, right: Number) -> Number:
    a, b = np.asarray(left.data, np.float64), np.asarray(right.data, np.float64)
    # A division by zero is not finite.
    result = _OPERATIONS[op](a, b)
    return Number(result, both(both(left.valid, right.valid), np.isfinite(result)))


def _joined(one: Number | None, other: Number) -> Number:
    """The numbers of both; no row has two."""
    if one is None:
        return other
    return Number(np.where(other.valid, other.data, one.data), either(one.valid, other.valid))


def _wholes(op: str, left: Number, right: Number) -> Number:
    a, b = np.asarray(left.data, np.int64), np.asarray(right.data, np.int64)
    valid = both(left.valid, right.valid)
    if op in ("/", "%"):
        overflow = (a == _LOWEST) & (b == -1)
        divisor = np.where((b == 0) | overflow, 1, b)
        # Division truncates towards zero, and the remainder has the sign of the dividend.
        rest = np.fmod(a, divisor)
        if op == "%":
            return Number(np.where(overflow, 0, rest), both(valid, b != 0))
        return Number((a - rest) // divisor, both(valid, (b != 0) & ~overflow))
    result = _OPERATIONS[op](a, b)
    return Number(result, both(valid, ~_overflow(op, a, b, result)))


def _overflow(
    op: str, a: npt.NDArray[np.int64], b: npt.NDArray[np.int64], result: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Where ``result``, the lower 64 bits, is not the result."""
    wrong: npt.NDArray[np.bool_]
    if op == "+":
        wrong = ((a ^ result) & (b ^ result)) < 0
    elif op == "-":
        wrong = ((a ^ b) & (a ^ result)) < 0
    else:
        wrong = np.abs(a.astype(np.float64) * b) >= _SURE
        if wrong.any():
            # -1 is apart, because the lowest integer divided by it overflows too.
            divisor = np.where((b == 0) | (b == -1), 1, b)
            wrong = np.where(b == -1, a == _LOWEST, wrong & (b != 0) & (result // divisor != a))
    return wrong
