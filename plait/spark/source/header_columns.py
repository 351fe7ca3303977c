"""Headers as Arrow columns: the text of their values and, in archives, the types of the values.

With the types a replay can send messages with the same headers. They are one letter per header, in order: s(tr), i(nt),
f(loat), b(ool). Null where all values are text, which is the usual case. A single x means that
the headers do not decode; their text is their bytes as hexadecimal digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import pyarrow as pa

from plait.client.send.encoding import encode_headers
from plait.frame.header_block import UNREADABLE, read_headers

#: The name of the column of types.
TYPES: Final = "header_types"
MAP: Final = pa.map_(pa.string(), pa.string())
#: Headers that do not decode are ``UNREADABLE`` and their bytes.
Headers = dict[str, str | bool | int | float] | dict[str, bytes]

_LETTERS: Final = {str: "s", bool: "b", int: "i", float: "f", bytes: "x"}
_PARSERS: Final[dict[str, Callable[[str], Any]]] = {"s": str, "i": int, "f": float, "b": lambda text: text == "true"}


def decoded(encoded: pa.Array) -> list[Headers | None]:
    """The headers of each row; None: the row has none."""
    rows: list[Headers | None] = []
    for row in encoded.to_pylist():
        headers = None if row is None else read_headers(row)
        rows.append({UNREADABLE: row} if headers is None and row is not None else headers)
    return rows


def header_maps(encoded: pa.Array) -> pa.Array:
    """Encoded headers as names and the text of their values."""
    return maps_of(None if encoded.null_count == len(encoded) else decoded(encoded), len(encoded))


def maps_of(rows: Sequence[Headers | None] | None, count: int) -> pa.Array:
    """Names and the text of values; ``rows`` is None where no row has headers."""
    if rows is None:
        return pa.nulls(count, MAP)
    return pa.array([None if row is None else [(name, _text(row[name])) for name in row] for row in rows], MAP)


def _text(value: str | float | bytes) -> str:
    if isinstance(value, bytes):
        return value.hex()
    return str(value).lower() if isinstance(value, bool) else str(value)


def letters_of(rows: Sequence[Headers | None] | None, count: int) -> pa.Array:
    """The type letters of headers, one string per row; ``rows`` is None where no row has headers."""
    if rows is None:
        return pa.nulls(count, pa.string())
    letters = [None if row is None else "".join(_LETTERS[type(value)] for value in row.values()) for row in rows]
    return pa.array([each if each and each.strip("s") else None for each in letters], pa.string())


def encoded_of(maps: pa.ChunkedArray, types: pa.ChunkedArray) -> pa.Array:
    """Headers as frames encode them, from their text and their types; null where there are no types."""
    if types.null_count == len(types):
        return pa.nulls(len(types), pa.binary())
    rows = zip(maps.to_pylist(), types.to_pylist(), strict=True)
    return pa.array([None if letters is None else _encoded(texts, letters) for texts, letters in rows], pa.binary())


def _encoded(texts: Iterable[tuple[str, str]], letters: str) -> bytes:
    if letters == "x":
        return bytes.fromhex("".join(text for _, text in texts))
    values = zip(texts, letters, strict=True)
    return encode_headers({name: _PARSERS[letter](text) for (name, text), letter in values})
