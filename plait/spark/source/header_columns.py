"""Headers as Arrow columns: the text of their values and, in archives, the types of the values.

With the types a replay can send messages with the same headers. They are one letter per header, in order: s(tr), i(nt),
f(loat), b(ool). Null where all values are text, which is the usual case. A single x means that
the headers do not decode; their text is their bytes as hexadecimal digits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import pyarrow as pa

from plait.client.send.encoding import UNREADABLE, encode_headers, read_headers

#: The name of the column of types.
TYPES: Final = "header_types"
MAP: Final = pa.map_(pa.string(), pa.string())
#: Headers that do not decode are ``UNREADABLE`` and their bytes.
Headers = dict[str, str | bool | int | float] | dict[str, bytes]

_LETTERS: Final = {str: "s", bool: "b", int: "i", float: "f", bytes: "x"}


def decoded(encoded: pa.Array) -> list[Headers | None]:
    """The headers of each row; None: the row has none."""
    return [None if row is None else _decoded(row) for row in encoded.to_pylist()]


def _decoded(encoded: bytes) -> Headers:
    headers = read_headers(encoded)
    return {UNREADABLE: encoded} if headers is None else headers


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
    return pa.array([None if row is None else _letters(row) for row in rows], pa.string())


def _letters(headers: Headers) -> str | None:
    letters = "".join(_LETTERS[type(value)] for value in headers.values())
    return letters if letters.strip("s") else None


def encoded_of(maps: pa.ChunkedArray, types: pa.ChunkedArray) -> pa.Array:
    """Headers as frames encode them, from their text and their types; null where there are no types."""
    if types.null_count == len(types):
        return pa.nulls(len(types), pa.binary())
    rows = zip(maps.to_pylist(), types.to_pylist(), strict=True)
    return pa.array([None if letters is None else _encoded(texts, letters) for texts, letters in rows], pa.binary())


def _encoded(texts: Iterable[tuple[str, str]], letters: str) -> bytes:
    if letters == "x":
        return bytes.fromhex("".join(text for _, text in texts))
    return encode_headers({name: _value(text, kind) for (name, text), kind in zip(texts, letters, strict=True)})


def _value(text: str, letter: str) -> Any:
    match letter:
        case "i":
            return int(text)
        case "f":
            return float(text)
        case "b":
            return text == "true"
    return text
