"""A report as one HTML page with inline styles and plots, which opens without a network, and as Parquet tables."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from plait.spark.auditing.report import (
    AuditReport,
    DeathCount,
    Example,
    GroupAudit,
    HotKey,
    Latency,
    Moment,
    PartitionAudit,
    SubjectAudit,
    format_seconds,
)

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5d6b7a; --paper: #fff; --line: #d8dee5; --main: #2f6fb2;
  --good: #1d7a46; --bad: #b3261e; --doubt: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ef; --soft: #9aa7b4; --paper: #15191e; --line: #323a44;
  --main: #6ea8e0; --good: #5cc48a; --bad: #f2857d; --doubt: #e0b050; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1060px;
  margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; } h2 { border-bottom: 1px solid var(--line); margin-top: 2.5rem; }
.verdict { font-size: 1.2rem; font-weight: 600; } .held { color: var(--good); } .broken { color: var(--bad); }
.unknown { color: var(--doubt); }
.soft { color: var(--soft); } .scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0 1rem; }
th, td { padding: .2rem .7rem .2rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child, .text td { text-align: left; } td.broken { font-weight: 600; }
svg { width: 100%; max-width: 720px; display: block; } svg text { font-size: 12px; fill: var(--soft); }
.grid { stroke: var(--line); } .line { fill: none; stroke: var(--main); stroke-width: 1.6; }
.area { fill: var(--main); opacity: .15; } .bar { fill: var(--main); }
"""

#: Of plots, in pixels.
WIDTH: Final = 720
HEIGHT: Final = 200
_LEFT: Final = 70
_RIGHT: Final = 12
_TOP: Final = 12
_BOTTOM: Final = 26
_BAR: Final = 20
#: Labels of bars longer than this are cut.
_LABEL_MAX: Final = 28

_COUNTS: Final = (
    *(
        "messages",
        "acked",
        "dead",
        "expired",
        "filtered",
        "unacked",
        "unknown",
        "lost",
        "double_acks",
        "delivered_twice",
    ),
    *("out_of_order", "invented", "retried"),
)
_ORDERS: Final = {"none": "no order is promised", "strict": "strict order", "best_tried": "best-tried order"}


def page(report: AuditReport) -> str:
    """The HTML page of a report."""
    times = f"{_format_time(report.time_min)} to {_format_time(report.time_max)}" if report.time_max else "nothing"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Audit of {html.escape(report.place)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>Audit</h1><p>{html.escape(report.place)}<br><span class='soft'>{html.escape(times)}</span></p>",
        _verdict(report),
        *(_subject(subject) for subject in report.subjects),
        "</body></html>\n",
    ]
    return "".join(parts)


def _verdict(report: AuditReport) -> str:
    unknown = report.unknown()
    unknown_list = _list(unknown) if unknown else ""
    if not report.held:
        return f'<p class="verdict broken">Promises were broken.</p>{_list(report.broken())}{unknown_list}'
    if report.judged:
        return f'<p class="verdict held">Every promise was kept.</p>{unknown_list}'
    return f'<p class="verdict unknown">Whether every promise was kept is not known.</p>{unknown_list}'


def _subject(subject: SubjectAudit) -> str:
    partitions = [(each.partition, float(each.messages)) for each in subject.partitions]
    keys = [(each.key, float(each.count)) for each in subject.hot_keys]
    facts = (
        f"Messages: {subject.messages:,}, partitions: {len(subject.partitions)}, missing: {subject.missing:,}. "
        f"The fullest partition has {subject.partition_skew:g} times the mean, the fullest logical partition "
        f"{subject.slot_skew:g} times."
    )
    parts = [f"<h2>{html.escape(subject.subject)}</h2><p>{facts}</p>", _groups(subject.groups)]
    if len(partitions) > 1:
        parts.append(f"<h3>Messages by partition</h3>{bar_plot(partitions, 'messages by partition')}")
    if keys:
        parts.append(f"<h3>Hot keys</h3>{bar_plot(keys, 'messages by key')}")
    parts += [_group(group) for group in subject.groups]
    return "".join(parts)


def _groups(groups: Sequence[GroupAudit]) -> str:
    if not groups:
        return "<p class='soft'>No consumer groups.</p>"
    rows = []
    for group in groups:
        marks = [' class="broken"' if name in group.broken else "" for name in _COUNTS]
        counts = [f"<td{mark}>{getattr(group, name):,}</td>" for name, mark in zip(_COUNTS, marks, strict=True)]
        rows.append("".join([*map(_cell, (group.group, group.kind)), *counts]))
    return _table(["group", "kind", *(name.replace("_", " ") for name in _COUNTS)], rows)


def _group(group: GroupAudit) -> str:
    parts = [f"<h3>Group {html.escape(group.group)}</h3>"]
    promised = _ORDERS[group.order]
    delivery = group.delivery.replace("_", " ")
    parts.append(f"<p class='soft'>{html.escape(group.kind)}, {html.escape(delivery)}, {promised}</p>")
    plot = line_plot([each.time for each in group.lag], [each.lag for each in group.lag], "lag over time")
    parts.append(f"<h4>Lag over time</h4>{plot}" if plot else "")
    if group.latency is not None:
        named = (("50 %", "p50"), ("90 %", "p90"), ("99 %", "p99"), ("99.9 %", "p999"), ("all", "max"))
        bars = [(name, getattr(group.latency, field)) for name, field in named]
        parts.append(f"<h4>From send to first ack</h4>{bar_plot(bars, 'latency percentiles', format_seconds)}")
    if group.redelivered:
        again = [(cause.replace("_", " "), float(count)) for cause, count in group.redelivered.items()]
        parts.append(f"<h4>Redelivered after</h4>{bar_plot(again, 'redeliveries by cause')}")
    if group.deaths:
        deaths = [(each.type or "no longer stored", each.handler or "", f"{each.count:,}") for each in group.deaths]
        rows = ["".join(map(_cell, cells)) for cells in deaths]
        parts.append(f"<h4>Dead letters by reason</h4>{_table(('type', 'handler', 'messages'), rows, 'text')}")
    return "".join(parts)


def _table(columns: Iterable[str], rows: Iterable[str], style: str = "") -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<div class='scroll'><table class='{style}'><tr>{head}</tr>{body}</table></div>"


def _cell(text: str) -> str:
    return f"<td>{html.escape(text)}</td>"


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(item)}</li>' for item in items)}</ul>"


def _format_time(micros: int) -> str:
    return datetime.fromtimestamp(micros / 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


# --- plots: inline SVG, without scripts, fonts or images from elsewhere ------------------------


def format_count(value: float) -> str:
    """A number with a unit prefix, short enough for an axis."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def line_plot(times: Sequence[int], values: Sequence[int], title: str) -> str:
    """Values over time (microseconds since 1970), as a filled line."""
    if len(times) < 2:
        return ""
    top = max(*values, 1)
    low, high = times[0], times[-1]
    inner_width, inner_height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def x(time: int) -> float:
        return _LEFT + (time - low) / (high - low or 1) * inner_width

    def y(value: float) -> float:
        return _TOP + (1 - value / top) * inner_height

    points = " ".join(f"{x(time):.1f},{y(value):.1f}" for time, value in zip(times, values, strict=True))
    base = f"{y(0):.1f}"
    parts = [_opened(HEIGHT, title)]
    for share in (0.0, 0.5, 1.0):
        at = y(top * share)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(_LEFT - 6, at + 4, format_count(top * share), "end"))
    for time, anchor in ((low, "start"), (high, "end")):
        parts.append(_text(x(time), HEIGHT - 6, _format_time(time), anchor))
    parts.append(f'<polygon class="area" points="{x(low):.1f},{base} {points} {x(high):.1f},{base}"/>')
    parts.append(f'<polyline class="line" points="{points}"/></svg>')
    return "".join(parts)


def bar_plot(bars: Sequence[tuple[str, float]], title: str, label: Callable[[float], str] = format_count) -> str:
    """Named values as horizontal bars."""
    if not bars:
        return ""
    left = 210
    top = max(value for _, value in bars) or 1
    height = _BAR * len(bars) + 8
    parts = [_opened(height, title)]
    for number, (name, value) in enumerate(bars):
        y = 4 + number * _BAR
        width = value / top * (WIDTH - left - 90)
        shown = name if len(name) <= _LABEL_MAX else name[: _LABEL_MAX - 1] + "…"
        parts.append(_text(left - 8, y + 14, shown, "end"))
        parts.append(f'<rect class="bar" x="{left}" y="{y + 2}" width="{max(width, 1):.1f}" height="{_BAR - 5}"/>')
        parts.append(_text(left + width + 6, y + 14, label(value), "start"))
    parts.append("</svg>")
    return "".join(parts)


def _opened(height: int, title: str) -> str:
    shown = html.escape(title)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{shown}"><title>{shown}</title>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


# --- tables -------------------------------------------------------------------------------------

_TYPES: Final = {
    str: pa.string(),
    str | None: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    list[str]: pa.list_(pa.string()),
}


def _columns(struct: type[msgspec.Struct], *keys: str) -> dict[str, pa.DataType]:
    """The columns of a table: the keys, and the fields of the struct except nested ones."""
    fields = {field.name: _TYPES[field.type] for field in msgspec.structs.fields(struct) if field.type in _TYPES}
    return {**dict.fromkeys(keys, pa.string()), **fields}


#: Table → column → type.
TABLES: Final[dict[str, dict[str, pa.DataType]]] = {
    "groups": {
        **_columns(GroupAudit),
        **{name: kind for name, kind in _columns(Latency).items() if name != "count"},
    },
    "redelivered": {**dict.fromkeys(("subject", "group", "cause"), pa.string()), "count": pa.int64()},
    "deaths": _columns(DeathCount, "subject", "group"),
    "lag": {**_columns(Moment, "subject", "group"), "time": pa.timestamp("us", tz="UTC")},
    "partitions": _columns(PartitionAudit, "subject"),
    "hot_keys": _columns(HotKey, "subject"),
    "examples": _columns(Example, "subject", "group"),
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
