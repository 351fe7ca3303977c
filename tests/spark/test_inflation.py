"""Frames with a high compression ratio: batches are limited by the size of the rows, not of the frames on disk."""

from __future__ import annotations

import pyarrow as pa

from plait.frame.builder import build_frame
from plait.frame.view import FrameView
from plait.limits import MIB
from plait.spark.source.spark_columns import BATCH_SIZE, COLUMNS, record_batches
from plait.storage.reading.log_chunks import ChunkPartition


def test_a_batch_is_limited_by_its_uncompressed_size():
    partition = ChunkPartition("s", "s")
    frames = [
        (partition, FrameView(build_frame([bytes(MIB)] * 2, producer=1, first=2 * n + 1, compression="zstd").tobytes()))
        for n in range(20)
    ]
    assert sum(view.size for _, view in frames) < MIB // 8
    schema = pa.schema([(name, COLUMNS[name].type) for name in ("body",)])
    sizes = [batch.nbytes for batch in record_batches(frames, schema, "g1")]
    assert len(sizes) >= 9
    assert max(sizes) <= BATCH_SIZE + 3 * MIB
