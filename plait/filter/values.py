"""The values of rows: text, an integer, a double, or null."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
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
    # Not ``to_numpy``, which imports pandas: that would block the loop for a quarter of a second.
    valid, values = found.buffers()
    flags = _bits(values, found)
    return flags & _bits(valid, found) if found.null_count else flags


def _bits(buffer: pa.Buffer, array: pa.BooleanArray) -> npt.NDArray[np.bool_]:
    bits = np.unpackbits(np.frombuffer(buffer, np.uint8), count=array.offset + len(array), bitorder="little")
    return bits[array.offset :].view(np.bool_)


def text_array(texts: Sequence[str]) -> pa.Array:
    """Text by row. Not ``pa.array``, which imports pandas."""
    encoded = [text.encode() for text in texts]
    offsets = np.zeros(len(encoded) + 1, np.int32)
    np.cumsum(list(map(len, encoded)), out=offsets[1:])
    return pa.Array.from_buffers(
        pa.string(), len(encoded), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    )


def arrow(text: pa.Array | str) -> pa.Array | pa.Scalar:
    return _scalar(text) if isinstance(text, str) else text


@lru_cache(256)
def _scalar(text: str) -> pa.Scalar:
    """Not ``pa.scalar``, which imports pandas."""
    return text_array([text])[0]
