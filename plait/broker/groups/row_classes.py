"""The class of each row of a frame: its priority, and the bucket of the tenant that it belongs to.

A bucket is a hash of the row's key or of one of its headers, so a group has at most 1024 (``LOGICAL_PARTITIONS``) and
one for rows without a tenant.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from xxhash import xxh3_64_intdigest

from plait.errors import FrameError
from plait.frame.columns import Column
from plait.frame.header_block import read_headers
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS, PRIORITY_MAX
from plait.model.logical_partitions import NO_KEY_HASH

#: The bucket of rows without a tenant; of all rows of a group without ``fair_by``.
NO_TENANT: Final = LOGICAL_PARTITIONS
#: A class as one number: priority * STRIDE + bucket.
STRIDE: Final = LOGICAL_PARTITIONS + 1

Classes = npt.NDArray[np.int64]


def classes_of(frame: FrameView, first: int, last: int, fair_by: str | None) -> Classes:
    """The classes of the rows [first, last). Rows of a damaged frame have priority 0 and no tenant."""
    count = last - first
    try:
        ranks = frame.fixed(Column.PRIORITY)[first:last] if frame.has(Column.PRIORITY) else np.zeros(count, np.int64)
        buckets = _buckets(frame, first, last, fair_by)
    except (FrameError, UnicodeDecodeError):
        ranks, buckets = np.zeros(count, np.int64), np.full(count, NO_TENANT)
    classes: Classes = np.minimum(ranks, PRIORITY_MAX).astype(np.int64) * STRIDE + buckets
    return classes


def _buckets(frame: FrameView, first: int, last: int, fair_by: str | None) -> Classes:
    if fair_by is None:
        return np.full(last - first, NO_TENANT)
    if fair_by != "key":
        return _of_header(frame, first, last, fair_by)
    hashes = frame.key_hashes()
    if hashes is None:
        return np.full(last - first, NO_TENANT)
    rows = hashes[first:last]
    return np.where(rows == NO_KEY_HASH, NO_TENANT, (rows % np.uint64(LOGICAL_PARTITIONS)).astype(np.int64))


def _of_header(frame: FrameView, first: int, last: int, name: str) -> Classes:
    """The buckets of the values of a header. Each distinct value is hashed once, as text."""
    nothing = np.full(last - first, NO_TENANT)
    if not frame.has(Column.HEADERS):
        return nothing
    block = frame.header_block()
    values = None if block is None else block.array(name)
    if values is not None:
        return _of_values(values.slice(first, last - first), _bucket)
    maps = frame.binary(Column.HEADERS) if block is None else block.rest_maps()
    return nothing if maps is None else _of_values(maps.slice(first, last - first), partial(_bucket_in, name))


def _of_values(values: pa.Array, bucket: Callable[[Any], int]) -> Classes:
    encoded = values.dictionary_encode()
    buckets = [*map(bucket, encoded.dictionary.to_pylist()), NO_TENANT]
    found: Classes = np.array(buckets)[encoded.indices.fill_null(len(buckets) - 1).to_numpy()]
    return found


def _bucket(value: Any) -> int:
    return xxh3_64_intdigest(str(value).encode()) % LOGICAL_PARTITIONS


def _bucket_in(name: str, encoded: bytes) -> int:
    """The bucket of the header in an encoded map of headers."""
    value = (read_headers(encoded) or {}).get(name)
    return NO_TENANT if value is None else _bucket(value)
