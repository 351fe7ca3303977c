"""The columns of several frames, joined: one array for a column of all frames."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.errors import FrameError
from plait.frame.arrow import headers
from plait.frame.columns import FIXED_TYPES, Codec, Column, check_text, label
from plait.frame.header_block import HeaderBlock, is_block
from plait.frame.run_tables import RUN, Runs
from plait.frame.view import FrameView
from plait.spark.source.header_columns import Headers, decoded
from plait.storage.reading.log_chunks import ChunkPartition

_RAW: Final = int(Codec.RAW)
_CONST: Final = int(Codec.CONST)

Offsets = npt.NDArray[np.int32]


class Frames:
    """The frames of one batch, with the data that several columns are built from."""

    def __init__(self, members: Sequence[tuple[ChunkPartition, FrameView]], group: str) -> None:
        self.group = group
        self.partitions = [partition for partition, _ in members]
        self.views = [view for _, view in members]
        self.counts = np.array([view.count for view in self.views])
        self.count = int(self.counts.sum())
        self.column_bits = 0
        for view in self.views:
            self.column_bits |= view.column_bits
        #: A selection of rows that a broker made from a compressed frame. It is the only frame of its batch.
        self.selected = self.views[0] if self.has(Column.SELECTION) else None
        if self.selected is not None and len(members) > 1:
            raise FrameError("a batch has a selection of rows and other frames")
        self._keys: tuple[Offsets, memoryview] | None = None
        self._headers: list[HeaderBlock | list[Headers | None]] | None = None
        #: Block → its headers that have no column, decoded.
        self._rests: dict[int, list[Headers | None]] = {}

    def has(self, column: int) -> bool:
        """Whether any frame has the column."""
        return bool(self.column_bits >> column & 1)

    def repeat(self, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """One value per frame, repeated for each of its rows."""
        return np.repeat(np.array(values, np.int64), self.counts)

    def keys(self) -> tuple[Offsets, memoryview]:
        """Order keys; empty where a row has none."""
        if self._keys is None:
            self._keys = self.variable(Column.KEY)
            check_text(*self._keys, Column.KEY)
        return self._keys

    def headers(self) -> list[HeaderBlock | list[Headers | None]]:
        """Headers in pieces of one or several frames: as a block, or decoded once for all columns that use them."""
        if self._headers is None:
            blocks = [view.header_block() for view in self.views]
            if not any(blocks):
                self._headers = [decoded(self.encoded_headers())]
            else:
                self._headers = [
                    block or decoded(headers(view)) for block, view in zip(blocks, self.views, strict=True)
                ]
        return self._headers

    def rest_of(self, block: HeaderBlock) -> list[Headers | None]:
        """The headers of each row that have no column in the block, decoded once for all columns that use them."""
        maps = block.rest_maps()
        if id(block) not in self._rests:
            self._rests[id(block)] = [None] * block.count if maps is None else decoded(maps)
        return self._rests[id(block)]

    def encoded_headers(self) -> pa.Array:
        """Headers as they were sent, one msgpack map per row; null: no headers."""
        if not self.has(Column.HEADERS):
            return pa.nulls(self.count, pa.binary())
        return nullable(pa.binary(), *self.variable(Column.HEADERS))

    def variable(self, column: int) -> tuple[Offsets, memoryview]:
        """Offsets and data of a variable column; rows of frames without it are empty."""
        if len(self.views) == 1 and self.views[0].has(column):
            return self.views[0].variable(column)
        offsets: list[Any] = []
        pieces: list[memoryview] = []
        for view in self.views:
            codec, start, end = view.places.get(column, (_RAW, 0, 0))
            if end == 0:
                offsets.append(bytes(4 * (view.count + 1)))
                pieces.append(memoryview(b""))
            elif codec == _RAW and not (column == Column.HEADERS and is_block(view.buffer[start:end])):
                split = start + 4 * (view.count + 1)
                offsets.append(view.buffer[start:split])
                pieces.append(view.buffer[split:end])
            else:
                own_offsets, data = view.variable(column)
                offsets.append(own_offsets)
                pieces.append(data)
        return self._joined(column, np.frombuffer(b"".join(offsets), "<i4"), pieces)

    def _joined(self, column: int, offsets: Offsets, pieces: list[memoryview]) -> tuple[Offsets, memoryview]:
        ends = np.cumsum(self.counts + 1)
        sizes = np.array([len(piece) for piece in pieces])
        lengths = np.delete(np.diff(offsets), ends[:-1] - 1)
        # The offsets of each frame must ascend and cover exactly its data.
        fits = len(offsets) == ends[-1] and np.array_equal(offsets[ends - 1] - offsets[ends - 1 - self.counts], sizes)
        if not fits or lengths.min() < 0:
            raise FrameError(f"{label(column)} column has offsets that do not fit its data")
        joined = np.zeros(self.count + 1, np.int32)
        np.cumsum(lengths, out=joined[1:])
        return joined, memoryview(b"".join(pieces))

    def fixed(self, column: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]:
        """Values of a fixed column, and a mask of the rows that have one (None: all)."""
        if self.selected is not None:
            return np.ascontiguousarray(self.selected.fixed(column)), None
        dtype = FIXED_TYPES[column]
        pieces: list[memoryview | bytes] = []
        has = []
        for view in self.views:
            codec, start, end = view.places.get(column, (_CONST, 0, 0))
            data = view.buffer[start:end] if end else bytes(dtype.itemsize)
            has.append(end > 0)
            if codec == _CONST:
                data = bytes(data) * view.count
            if codec not in (_RAW, _CONST) or len(data) != view.count * dtype.itemsize:
                raise FrameError(f"{label(column)} column does not fit its {view.count} rows")
            pieces.append(data)
        values = np.frombuffer(b"".join(pieces) if len(pieces) > 1 else pieces[0], dtype)
        return values, None if all(has) else np.repeat(has, self.counts)

    def runs(self) -> Runs:
        """The runs of rows of one producer, in row order."""
        if not self.has(Column.RUNS):
            runs = array("Q")
            for view in self.views:
                runs.extend((view.producer, view.first, view.count, view.previous))
            return np.frombuffer(runs, RUN)
        return np.concatenate([view.runs() for view in self.views])


def nullable(kind: pa.DataType, offsets: Offsets, data: memoryview) -> pa.Array:
    """An array in which empty values are null."""
    filled = offsets[1:] != offsets[:-1]
    buffers = [validity(filled), pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, len(filled), buffers)


def validity(valid: npt.NDArray[np.bool_]) -> pa.Buffer | None:
    """The validity bits of an array; None: all values are valid."""
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
