"""Header blocks as the maps of the source: whole columns at a time, no row is decoded."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from plait.frame.header_block import HeaderBlock
from plait.spark.source.header_columns import MAP, letters_of, maps_of

_TEXT: Final = pa.string()


def map_array(block: HeaderBlock) -> pa.Array:
    """The headers of each row: names and the text of their values; null for a row without headers."""
    if block.rest is not None:
        return maps_of([each or None for each in block.maps()], block.count)
    present = _present(block)
    counts = present.sum(axis=1)
    # The values of all columns, one column after another; then those of the rows, in row order.
    values = pa.concat_arrays([_texts(block, column.name) for column in block.columns])
    rows, columns = np.nonzero(present)
    names = pa.array([column.name for column in block.columns], _TEXT)
    entries = [names.take(_indexes(columns)), values.take(_indexes(columns * block.count + rows))]
    offsets = np.zeros(block.count + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    validity = None if counts.all() else pa.py_buffer(np.packbits(counts > 0, bitorder="little"))
    fields = [pa.field("key", _TEXT, nullable=False), pa.field("value", _TEXT)]
    children = [pa.StructArray.from_arrays(entries, fields=fields)]
    return pa.Array.from_buffers(MAP, block.count, [validity, pa.py_buffer(offsets)], children=children)


def letter_array(block: HeaderBlock) -> pa.Array:
    """The type letters of the headers of each row (``header_columns``)."""
    if block.rest is not None:
        return letters_of([each or None for each in block.maps()], block.count)
    letters = [_letter(block.array(column.name)) for column in block.columns]
    present = _present(block)
    # Few different sets of names occur: each becomes a number (a block has at most 64 names), and one text.
    bits = np.uint64(1) << np.arange(len(letters), dtype=np.uint64)
    _, first, which = np.unique(present @ bits, return_index=True, return_inverse=True)
    texts = [
        "".join(letter for letter, has in zip(letters, row, strict=True) if has) for row in present[first].tolist()
    ]
    known = pa.array([each if each.strip("s") else None for each in texts], _TEXT)
    return known.take(_indexes(which))


def _present(block: HeaderBlock) -> npt.NDArray[np.bool_]:
    """A row for each row of the block, a column for each name: whether the row has the name."""
    present = np.ones((block.count, len(block.columns)), bool)
    for index, column in enumerate(block.columns):
        if column.present is not None:
            present[:, index] = column.present
    return present


def _texts(block: HeaderBlock, name: str) -> pa.Array:
    array: Any = block.array(name)
    if pa.types.is_floating(array.type):
        # Python's text of a float, as for headers that are decoded: Arrow writes 1.0 as 1.
        return pa.array(list(map(str, array.to_numpy(zero_copy_only=False).tolist())), _TEXT)
    return pc.cast(array, _TEXT)


def _letter(array: Any) -> str:
    if pa.types.is_string(array.type):
        return "s"
    if pa.types.is_boolean(array.type):
        return "b"
    return "f" if pa.types.is_floating(array.type) else "i"


def _indexes(values: npt.NDArray[np.integer[Any]]) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(np.ascontiguousarray(values, np.int64))])
