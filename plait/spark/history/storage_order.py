"""Sorts rows into the order in which they were stored: within each partition by sequence, partitions interleaved by
store time.

If a broker's clock is set back, the rows of a partition keep their order, since a row is sorted as no earlier than the
rows before it. So the messages of a key are in the order of its partition, followed by the messages in the partition
that the key moved to. The order depends on the rows alone, not on the files that they come from.

Few rows are sorted in memory. More are written to a temporary directory in sorted runs and merged from there, so that
memory stays bounded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import IO, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from plait.limits import MIB
from plait.spark.source import arrow_scalars as bare

#: The size of the rows that are sorted at once.
RUN_SIZE: Final = 256 * MIB
#: Runs are written and read in pieces of about this size: one of each partition and run is in memory.
BLOCK_SIZE: Final = MIB

#: If only the first few rows are wanted, this many are collected before the others are discarded.
CUT_COUNT: Final = 65_536

Keys = npt.NDArray[np.int64]
#: Rows and their merge keys, ascending.
Block = tuple[pa.Table, Keys]

_ORDER: Final = [("partition", "ascending"), ("sequence", "ascending")]


class Ordering:
    """Takes rows in any order and returns them in storage order; a context manager."""

    def __init__(self, *, limit: int | None = None, run_size: int = RUN_SIZE, block_size: int = BLOCK_SIZE) -> None:
        self._limit = limit
        self._run_size = run_size
        self._block_size = block_size
        #: The number of rows that were added.
        self.count = 0
        #: With a limit: as many rows were stored up to this time, in microseconds, so later rows are not needed.
        self.bound: int | None = None
        self._rows: list[pa.Table] = []
        self._size = 0
        self._held = 0
        self._runs: list[_SortedRun] = []
        self._files = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def add(self, rows: pa.Table) -> None:
        """Add rows, which have the columns partition, sequence and store_time, and any others."""
        if rows.num_rows:
            self._rows.append(rows)
            self._size += rows.nbytes
            self._held += rows.num_rows
            self.count += rows.num_rows
            limit, is_full = self._limit, self._size >= self._run_size
            # Where runs are written, the merge stops at the limit.
            if limit is not None and not self._runs and self._held > limit:
                is_many = self._held >= max(2 * limit, CUT_COUNT)
                if is_full or is_many:
                    self._cut(limit)
            if self._size >= self._run_size:
                file = self._files.enter_context(tempfile.TemporaryFile(prefix="plait-"))  # noqa: SIM115
                self._runs.append(_SortedRun(file, self._partitions(), self._block_size))

    def _cut(self, limit: int) -> None:
        """Discard rows that are not among the first."""
        rows = pa.concat_tables(self._merged(self._partitions())).slice(0, limit)
        self.bound = int(bare.values(rows["store_time"].cast(pa.int64()), np.int64).max())
        self._rows, self._size, self._held = [rows], rows.nbytes, rows.num_rows

    def _partitions(self) -> dict[str, pa.Table]:
        """The rows that were added since the last run, by partition, sorted by sequence."""
        rows = pa.concat_tables(self._rows).combine_chunks()
        self._rows, self._size, self._held = [], 0, 0
        rows = rows.take(pc.sort_indices(rows, _ORDER))
        codes = rows["partition"].combine_chunks().dictionary_encode()
        numbers = bare.values(codes.indices, np.int32)
        starts = np.concatenate([[0], np.flatnonzero(np.diff(numbers)) + 1, [len(numbers)]])
        names = codes.dictionary.to_pylist()
        return {names[numbers[start]]: rows.slice(start, end - start) for start, end in pairwise(starts.tolist())}

    def tables(self) -> Iterator[pa.Table]:
        """All rows, or the first ``limit``, as a series of tables. Call it once, after all rows were added."""
        left = self._limit
        # The rows in memory are the last run; they are not written.
        for rows in self._merged(self._partitions() if self._rows else {}):
            if left is not None:
                rows = rows.slice(0, left)
                left -= rows.num_rows
            yield rows
            if left == 0:
                return

    def _merged(self, rest: dict[str, pa.Table]) -> Iterator[pa.Table]:
        names = sorted({*rest, *(name for run in self._runs for name in run.blocks)})
        streams = []
        for name in names:
            parts = [run.read(name) for run in self._runs if name in run.blocks]
            if name in rest:
                parts.append(iter([(rest[name], _sequences(rest[name]))]))
            streams.append(_by_time(parts[0] if len(parts) == 1 else merge(parts)))
        for rows, _ in merge(streams):
            yield rows


class _SortedRun:
    """Sorted rows in a file of blocks, and the blocks of each partition."""

    def __init__(self, file: IO[bytes], partitions: dict[str, pa.Table], block_size: int) -> None:
        self.blocks: dict[str, range] = {}
        schema = next(iter(partitions.values())).schema
        written = 0
        with pa.ipc.new_file(file, schema) as writer:
            for name, rows in partitions.items():
                count = max(1, block_size * rows.num_rows // max(rows.nbytes, 1))
                batches = rows.to_batches(max_chunksize=count)
                for batch in batches:
                    writer.write_batch(batch)
                self.blocks[name] = range(written, written + len(batches))
                written += len(batches)
        self._reader = pa.ipc.open_file(file)

    def read(self, partition: str) -> Iterator[Block]:
        for number in self.blocks[partition]:
            rows = pa.Table.from_batches([self._reader.get_batch(number)])
            yield rows, _sequences(rows)


def _sequences(rows: pa.Table) -> Keys:
    return bare.values(rows["sequence"], np.int64)


def _by_time(blocks: Iterator[Block]) -> Iterator[Block]:
    """The rows of a partition with their store times as keys, each no earlier than the one before it."""
    latest = np.int64(0)
    for rows, _ in blocks:
        times = bare.values(rows["store_time"].cast(pa.int64()), np.int64)
        keys = np.maximum.accumulate(np.maximum(times, latest))
        latest = keys[-1]
        yield rows, keys


# --- merging ------------------------------------------------------------------------------------


class _Pending:
    """The rows of a stream that are read and not merged yet."""

    def __init__(self, stream: Iterator[Block]) -> None:
        self._stream = stream
        self.rows: pa.Table | None = None
        self.keys: Keys = np.zeros(0, np.int64)
        self.ended = False
        self.more()

    def more(self) -> None:
        """Read the next block of the stream."""
        block = next(self._stream, None)
        if block is None:
            self.ended = True
            return
        rows, keys = block
        self.rows = rows if self.rows is None else pa.concat_tables([self.rows, rows])
        self.keys = np.concatenate([self.keys, keys])

    def take(self, count: int) -> pa.Table:
        """Remove and return the first rows."""
        assert self.rows is not None
        taken = self.rows.slice(0, count)
        self.rows, self.keys = self.rows.slice(count), self.keys[count:]
        return taken


def merge(streams: Sequence[Iterator[Block]]) -> Iterator[Block]:
    """Merge streams with ascending keys into one; of equal keys, those of the first stream come first."""
    pending = [_Pending(stream) for stream in streams]
    while True:
        # Rows below the last key of every stream are complete.
        bound = min((each.keys[-1] for each in pending if not each.ended), default=None)
        taken: list[pa.Table] = []
        keys: list[Keys] = []
        for each in pending:
            count = len(each.keys) if bound is None else int(np.searchsorted(each.keys, bound, "left"))
            if count:
                keys.append(each.keys[:count])
                taken.append(each.take(count))
        if len(taken) == 1:
            yield taken[0], keys[0]
        elif taken:
            joined = np.concatenate(keys)
            order = np.argsort(joined, kind="stable")
            yield pa.concat_tables(taken).combine_chunks().take(bare.integers(order)), joined[order]
        if bound is None:
            return
        for each in pending:
            if not each.ended and each.keys[-1] <= bound:
                each.more()
