"""A report as Parquet files, one per table, for queries and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from plait.spark.auditing.report import AuditReport

_TEXT: Final = pa.string()
_COUNT: Final = pa.int64()
_TIME: Final = pa.timestamp("us", tz="UTC")

#: Table → column → type.
TABLES: Final[dict[str, dict[str, pa.DataType]]] = {
    "groups": {
        **dict.fromkeys(("subject", "group", "kind", "delivery", "order"), _TEXT),
        **dict.fromkeys(
            (
                "messages",
                "acked",
                "dead",
                "expired",
                "unacked",
                "in_flight",
                "returned",
                "pending",
                "unknown",
                "lost",
                "double_acks",
                "delivered_twice",
                "out_of_order",
                "invented",
                "acked_again",
                "retried",
                "died",
            ),
            _COUNT,
        ),
        "broken": pa.list_(_TEXT),
        "forgotten": pa.bool_(),
        **dict.fromkeys(("p50", "p90", "p99", "p999", "max"), pa.float64()),
    },
    "redelivered": {"subject": _TEXT, "group": _TEXT, "cause": _TEXT, "count": _COUNT},
    "deaths": {"subject": _TEXT, "group": _TEXT, "type": _TEXT, "handler": _TEXT, "count": _COUNT},
    "lag": {"subject": _TEXT, "group": _TEXT, "time": _TIME, "stored": _COUNT, "lag": _COUNT},
    "partitions": {
        "subject": _TEXT,
        "partition": _TEXT,
        **dict.fromkeys(("messages", "first", "end", "missing"), _COUNT),
    },
    "hot_keys": {"subject": _TEXT, "key": _TEXT, "count": _COUNT},
    "examples": {"subject": _TEXT, "group": _TEXT, "promise": _TEXT, "partition": _TEXT, "sequence": _COUNT},
}


def write_tables(report: AuditReport, directory: Path) -> None:
    """Write ``<table>.parquet`` for each table into a new directory."""
    directory.mkdir(parents=True)
    for name, rows in tables_of(report).items():
        schema = pa.schema([pa.field(column, kind) for column, kind in TABLES[name].items()])
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), directory / f"{name}.parquet", compression="zstd")


def tables_of(report: AuditReport) -> dict[str, list[dict[str, Any]]]:
    """The rows of each table."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
    for subject in report.subjects:
        of = {"subject": subject.subject}
        rows["partitions"] += [{**of, **msgspec.structs.asdict(each)} for each in subject.partitions]
        rows["hot_keys"] += [{**of, **msgspec.structs.asdict(each)} for each in subject.hot_keys]
        rows["examples"] += [{**of, **msgspec.structs.asdict(each)} for each in subject.examples]
        for group in subject.groups:
            mine = {**of, "group": group.group}
            latency = msgspec.structs.asdict(group.latency) if group.latency else {}
            rows["groups"].append({**msgspec.structs.asdict(group), **latency})
            rows["redelivered"] += [{**mine, "cause": cause, "count": n} for cause, n in group.redelivered.items()]
            rows["deaths"] += [{**mine, **msgspec.structs.asdict(each)} for each in group.deaths]
            rows["lag"] += [{**mine, **msgspec.structs.asdict(each)} for each in group.lag]
            rows["examples"] += [{**mine, **msgspec.structs.asdict(each)} for each in group.examples]
    return rows
