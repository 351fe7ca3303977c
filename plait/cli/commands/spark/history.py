"""``plait spark history``: finds messages in an archive and the live log. Needs Java only with ``--spark``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from plait.cli.commands.spark.selection_options import Where
from plait.cli.options import Output, described, flag
from plait.cli.output import print_json_line, print_table, printable, shortened, shown_body, text_or_base64
from plait.cli.progress import ProgressSteps
from plait.errors import InvalidArgument
from plait.model.names import counted

if TYPE_CHECKING:
    import pyarrow as pa

    from plait.spark.history.lookup import History
    from plait.spark.history.selection import HistorySelection

#: Characters of a body in a table. JSON and Parquet have the whole body.
BODY_WIDTH = 100
#: The most messages in a table.
TABLE_MAX = 10_000
_TIMES = ("send_time", "store_time")
_COLUMNS = ("stored", "partition", "sequence", "message id", "key", "tags", "headers", "body")


def history(
    where: Where,
    *,
    limit: Annotated[int | None, described("Only the first this many.")] = None,
    server: Annotated[
        str | None, described("A node with messages that are not archived, plait://host:port; instead of --data.")
    ] = None,
    parquet: Annotated[
        str | None,
        described("Write the messages to this file; with --spark, to a directory of this name, or a URI."),
    ] = None,
    spark: Annotated[bool, flag("Read with Spark, for large parts of an archive. Needs plait[spark].")] = False,
    master: Annotated[str | None, described("With --spark: the Spark master; default: this machine.")] = None,
    output: Output = "table",
) -> None:
    """Find messages in an archive and the live log."""
    if parquet is not None and "://" in parquet and not spark:
        raise InvalidArgument(f"{parquet!r} is not a file of this machine; add --spark, or name a local file")
    if parquet is not None and os.path.exists(parquet):
        raise InvalidArgument(f"{parquet!r} exists already; name another file, or remove it")
    if spark and parquet is not None and limit is not None:
        raise InvalidArgument("--limit cannot be used with --spark and --parquet: tasks write at once, in no order")
    if master is not None and not spark:
        raise InvalidArgument("--master needs --spark; add it")
    with where.open(server) as opened, ProgressSteps() as steps:
        selection = where.selection(opened, limit=limit)
        if spark:
            from plait.spark.history import spark_lookup

            if parquet is not None:
                count = spark_lookup.write(_session(master), opened, selection, parquet, steps)
                sys.stderr.write(f"{counted(count, 'message')} written to {parquet}\n")
                return
            tables = spark_lookup.tables(_session(master), opened, selection, limit=limit, progress=steps)
        else:
            tables = _here(opened, selection, limit, steps)
        if parquet is not None:
            _write(tables, Path(parquet))
        elif output == "json":
            for row in _rows(tables):
                print_json_line(_fields(row))
        else:
            _print(tables)


def _here(opened: History, selection: HistorySelection, limit: int | None, steps: ProgressSteps) -> Iterator[pa.Table]:
    def progress(done: int, total: int) -> None:
        steps.total(total)
        steps.update(done)

    steps.step("reading", unit="bytes")
    return opened.scan(selection, limit=limit, progress=progress)


def _session(master: str | None) -> Any:
    from plait.spark.runtime.session import session

    sys.stderr.write("starting Spark\n")
    return session("plait-history", master=master)


# --- showing ------------------------------------------------------------------------------------


def _write(tables: Iterable[pa.Table], path: Path) -> None:
    """Write a file. It appears under its name only when it is complete."""
    import pyarrow.parquet as pq

    from plait.spark.history.pieces import SCHEMA

    aside = path.with_name(f".{path.name}.{os.getpid()}")
    count = 0
    try:
        with pq.ParquetWriter(aside, SCHEMA, compression="zstd") as writer:
            for rows in tables:
                writer.write_table(rows)
                count += rows.num_rows
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sys.stderr.write(f"{counted(count, 'message')} written to {path}\n")


def _rows(tables: Iterable[pa.Table]) -> Iterator[dict[str, Any]]:
    import pyarrow as pa

    from plait.client.arguments import to_datetime

    for rows in tables:
        for name in _TIMES:
            # As integers: converting timestamps would import pandas.
            rows = rows.set_column(rows.schema.get_field_index(name), name, rows[name].cast(pa.int64()))
        for batch in rows.to_batches(max_chunksize=1000):
            for row in batch.to_pylist():
                yield row | {name: None if row[name] is None else to_datetime(row[name]) for name in _TIMES}


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    """A message as JSON fields, as in ``plait tail``."""
    body = row.pop("body")
    row["tags"] = row["tags"] or []
    row["headers"] = dict(row["headers"] or [])
    return row | text_or_base64(body)


def _print(tables: Iterable[pa.Table]) -> None:
    rows = _rows(tables)
    found = [_cells(row) for row in islice(rows, TABLE_MAX)]
    if found:
        print_table(_COLUMNS, found, right=("sequence",))
    else:
        sys.stderr.write("no message found\n")
    if next(rows, None) is not None:
        sys.stderr.write(f"only the first {TABLE_MAX:,} are shown; use -o json or --parquet for all\n")


def _cells(row: dict[str, Any]) -> list[str]:
    headers = " ".join(f"{printable(name)}={printable(value)}" for name, value in row["headers"] or [])
    return [
        row["store_time"].strftime("%Y-%m-%d %H:%M:%S.%f")[:-3],
        printable(row["partition"]),
        str(row["sequence"]),
        row["message_id"],
        printable(row["key"] or ""),
        ",".join(map(printable, row["tags"] or [])),
        headers,
        shortened(shown_body(row["body"]), BODY_WIDTH),
    ]
