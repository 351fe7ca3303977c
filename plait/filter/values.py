"""The values of rows: text, an integer, a double, or null."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

#: True, or one flag for each row.
Flags = npt.NDArray[np.bool_] | bool


class Text(NamedTuple):
    """Text by row, or one text for all rows; and which rows have one."""

    data: pa.Array | str
    valid: Flags


class Number(NamedTuple):
    """Numbers of one kind by row, or one for all rows; and which rows have one."""

    data: npt.NDArray[Any] | int | float
    valid: Flags


class Values(NamedTuple):
    """The value of each row. A row has at most one of the three: the result for a row never depends on other rows."""

    text: Text | None = None
    #: int64 or bool.
    whole: Number | None = None
    #: double, without NaN.
    real: Number | None = None


class Fields(Protocol):
    """The fields of the rows that are evaluated."""

    def field(self, name: str) -> Values: ...

    def header(self, name: str) -> Values: ...

    def tagged(self, tag: str) -> Flags: ...


def both(one: Any, other: Any) -> Any:
    """AND of flags. Skips the work for one flag that stands for all rows."""
    if one is True or other is False:
        return other
    return one if other is True or one is False else one & other


def either(one: Any, other: Any) -> Any:
    """OR of flags."""
    if one is False or other is True:
        return other
    return one if other is False or one is True else one | other


def opposite(flags: Any) -> Any:
    """NOT of flags."""
    return not flags if isinstance(flags, bool) else ~flags


def truth(true: Any, known: Any) -> Values:
    """A condition as values: the numbers 1 and 0, or null where it is unknown."""
    return Values(whole=Number(true, known))


def as_flags(found: pa.BooleanArray | pa.BooleanScalar) -> Any:
    """The result of an Arrow function as flags; null is false."""
    if isinstance(found, pa.Scalar):
        return bool(found.as_py())
    return found.fill_null(False).to_numpy(zero_copy_only=False)


def arrow(text: pa.Array | str) -> pa.Array | pa.Scalar:
    return pa.scalar(text) if isinstance(text, str) else text
