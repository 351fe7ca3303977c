"""Messages in a data directory, and an archive of them, written as archivers lay one out, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import plait
from plait.broker import BrokerConfig
from plait.server import Server
from plait.spark import header_types
from plait.spark.columns import COLUMNS, Frames, encoded_headers, record_batches
from plait.spark.live import SCHEMA
from plait.spark.manifest import MESSAGES, Archive, ArchivedFile, Manifest, Source, source_id, subject_directory
from plait.storage.chunks import Wanted, plan, read_chunk
from plait.storage.disk import RealDisk
from plait.storage.identity import identity
from plait.storage.reader import open_log
from tests.support.broker_node import NO_WATERMARKS, SMALL_SEGMENTS


@asynccontextmanager
async def serving(root: Path, **settings: Any) -> AsyncIterator[plait.Client]:
    server = Server(RealDisk(root), BrokerConfig(**NO_WATERMARKS, **SMALL_SEGMENTS, **settings), port=0)
    await server.start()
    try:
        async with plait.connect(server.address) as client:
            yield client
    finally:
        await server.stop()


async def sent(root: Path, count: int, *, start: int = 0, keys: int = 3) -> None:
    """Messages n = start, start + 1, ... in frames of a few rows, with everything a message can have."""
    async with serving(root) as client:
        for number in range(start, start + count):
            await client.send(
                "orders",
                f"body-{number}",
                key=f"order-{number % keys}" if number % 5 else None,
                tags=["even", "größer"] if number % 2 == 0 else None,
                headers={"number": number, "half": number / 2, "odd": number % 2 == 1, "city": "BJS"},
            )
            if number % 7 == 0:
                await client.send("others", b"other", key="order-1")


def thirty_messages(root: Path) -> None:
    """In ``root``: ``archive`` with 20 messages, archived in two runs, and ``data`` with these and 10 more."""
    data, place = root / "data", root / "archive"
    asyncio.run(sent(data, 12))
    archive(data, place)
    asyncio.run(sent(data, 8, start=12))
    archive(data, place)
    asyncio.run(sent(data, 10, start=20))


def end_of(data: Path) -> int:
    """The log offset where a stopped server's log ends."""
    checkpoint = open_log(str(data)).checkpoint
    assert checkpoint is not None
    return checkpoint.manifest.message_offset


def archive(data: Path, place: Path, *, row_group_size: int = 4, group: str = "g1") -> Manifest:
    """Add everything up to the log's end."""
    store = Archive.at(place)
    before = store.load()
    name = source_id(group, identity(RealDisk(data)))
    known = before.sources.get(name, Source(group=group))
    end = end_of(data)
    rows = _rows(data, group)
    new = [row["sequence"] >= known.sequences.get(row["partition"], 0) for row in rows.to_pylist()]
    rows = rows.filter(pa.array(new, pa.bool_()))
    files = [*before.files]
    dates = pc.strftime(rows["store_time"], format="%Y-%m-%d")
    rows = rows.append_column("__date", dates)
    sequences = dict(known.sequences)
    for subject, date in sorted({(row["subject"], row["__date"]) for row in rows.to_pylist()}):
        some = rows.filter((pc.field("subject") == subject) & (pc.field("__date") == date))
        file = _write(store, some, subject, date, before.number + 1, name, (known.message_offset, end), row_group_size)
        files.append(file)
        for partition, (_, last) in file.partitions.items():
            sequences[partition] = max(sequences.get(partition, 0), last + 1)
    source = Source(group=group, message_offset=end, sequences=sequences)
    manifest = Manifest(number=before.number + 1, sources={**before.sources, name: source}, files=files)
    store.commit(manifest)
    return manifest


def _rows(data: Path, group: str) -> pa.Table:
    """Every row of the log."""
    reader = open_log(str(data))
    wanted = Wanted(prefixes=("",))
    chunks = plan(reader, wanted).chunks
    frames = [frame for chunk in chunks for frame in read_chunk(reader.disk, str(data), chunk, wanted)]
    rows = pa.Table.from_batches(record_batches(frames, SCHEMA, group), SCHEMA)
    return rows.append_column(header_types.COLUMN, header_types.types_of(encoded_headers(Frames(frames, group))))


def _write(
    store: Archive, rows: pa.Table, subject: str, date: str, number: int, source: str, span: tuple[int, int], size: int
) -> ArchivedFile:
    rows = rows.select([column for column in (*COLUMNS, header_types.COLUMN) if column != "subject"])
    rows = rows.sort_by([("key", "ascending"), ("partition", "ascending"), ("sequence", "ascending")])
    path = f"{subject_directory(subject, date)}/{number:06d}.parquet"
    store.files.create_dir(str(Path(store.path(path)).parent), recursive=True)
    pq.write_table(rows, store.path(path), compression="zstd", row_group_size=size)
    keys = rows["key"].drop_null().to_pylist()
    times = rows["store_time"].cast(pa.int64()).to_pylist()
    partitions = {
        name: (min(found), max(found))
        for name in set(rows["partition"].to_pylist())
        for found in [rows.filter(pc.field("partition") == name)["sequence"].to_pylist()]
    }
    return ArchivedFile(
        path=path,
        kind=MESSAGES,
        subject=subject,
        date=date,
        count=rows.num_rows,
        size=Path(store.path(path)).stat().st_size,
        checksum=0,
        source=source,
        start=span[0],
        end=span[1],
        partitions=partitions,
        key_min=min(keys, default=None),
        key_max=max(keys, default=None),
        time_min=min(times),
        time_max=max(times),
    )
