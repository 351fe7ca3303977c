"""The original types of header values: archives store them beside the text of the values, so that a replay can send
messages with the same headers.

One letter per header, in order: s(tr), i(nt), f(loat), b(ool). Null where all values are text, which is the usual case.
A single x means that the headers do not decode; their text is their bytes as hexadecimal digits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import pyarrow as pa

from plait.client.send.encoding import encode_headers

COLUMN: Final = "header_types"

_LETTERS: Final = {str: "s", bool: "b", int: "i", float: "f", bytes: "x"}


def letters_of(rows: Iterable[dict[str, Any] | None]) -> pa.Array:
    """The type letters of decoded headers, one string per row."""
    return pa.array([None if row is None else _letters(row) for row in rows], pa.string())


def _letters(headers: dict[str, Any]) -> str | None:
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
