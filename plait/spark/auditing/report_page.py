"""A report as one HTML page with inline styles and plots, which opens without a network."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from plait.spark.auditing.plots import bar_plot, line_plot
from plait.spark.auditing.report import PROMISES, AuditReport, GroupAudit, SubjectAudit

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

_COUNTS: Final = (
    "messages",
    "acked",
    "dead",
    "expired",
    "unacked",
    "unknown",
    "lost",
    "double_acks",
    "two_hands",
    "out_of_order",
    "invented",
    "retried",
)
_ORDERS: Final = {
    "none": "no order is promised",
    "strict": "strict order",
    "best_tried": "best-tried order",
    "not_known": "judged as best-tried order, as the archive does not have the order strategy",
}


def page(report: AuditReport) -> str:
    """The HTML page of a report."""
    times = f"{_format_time(report.time_min)} to {_format_time(report.time_max)}" if report.time_max else "nothing"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Audit of {_escaped(report.place)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>Audit</h1><p>{_escaped(report.place)}<br><span class='soft'>{_escaped(times)}</span></p>",
        _verdict(report),
        *(_subject(subject) for subject in report.subjects),
        "</body></html>\n",
    ]
    return "".join(parts)


def _verdict(report: AuditReport) -> str:
    unknown = list(_unknown(report))
    unknown_list = _list(unknown) if unknown else ""
    if not report.held:
        return f'<p class="verdict broken">Promises were broken.</p>{_list(_broken(report))}{unknown_list}'
    if report.judged:
        return f'<p class="verdict held">Every promise was kept.</p>{unknown_list}'
    return f'<p class="verdict unknown">Whether every promise was kept is not known.</p>{unknown_list}'


def _unknown(report: AuditReport) -> Iterable[str]:
    for group in report.groups():
        if group.unknown:
            yield (
                f"{group.subject}, group {group.group}: the outcome of {group.unknown:,} of {group.messages:,} "
                "messages is not known, because the action log begins after them"
            )


def _broken(report: AuditReport) -> Iterable[str]:
    for subject in report.subjects:
        holders = [("the message log", subject.broken, subject.examples)]
        holders += [(f"group {group.group}", group.broken, group.examples) for group in subject.groups]
        for holder, broken, examples in holders:
            for promise in broken:
                places = [f"{each.partition} {each.sequence}" for each in examples if each.promise == promise]
                shown = f", such as {', '.join(places)}" if places else ""
                yield f"{subject.subject}, {holder}: {PROMISES[promise]}{shown}"


def _subject(subject: SubjectAudit) -> str:
    partitions = [(each.partition, float(each.messages)) for each in subject.partitions]
    keys = [(each.key, float(each.count)) for each in subject.hot_keys]
    facts = (
        f"Messages: {subject.messages:,}, partitions: {len(subject.partitions)}, missing: {subject.missing:,}. "
        f"The fullest partition has {subject.partition_skew:g} times the mean, the fullest logical partition "
        f"{subject.slot_skew:g} times."
    )
    parts = [f"<h2>{_escaped(subject.subject)}</h2><p>{facts}</p>", _groups(subject.groups)]
    if len(partitions) > 1:
        parts.append(f"<h3>Messages by partition</h3>{bar_plot(partitions, 'messages by partition')}")
    if keys:
        parts.append(f"<h3>Hot keys</h3>{bar_plot(keys, 'messages by key')}")
    parts += [_group(group) for group in subject.groups]
    return "".join(parts)


def _groups(groups: Sequence[GroupAudit]) -> str:
    if not groups:
        return "<p class='soft'>No consumer groups.</p>"
    head = "".join(f"<th>{_escaped(name.replace('_', ' '))}</th>" for name in ("group", "kind", *_COUNTS))
    rows = []
    for group in groups:
        cells = [f"<td>{_escaped(group.group)}</td><td>{_escaped(group.kind)}</td>"]
        for name in _COUNTS:
            mark = ' class="broken"' if name in group.broken else ""
            cells.append(f"<td{mark}>{getattr(group, name):,}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<div class='scroll'><table><tr>{head}</tr>{''.join(rows)}</table></div>"


def _group(group: GroupAudit) -> str:
    parts = [f"<h3>Group {_escaped(group.group)}</h3>"]
    promised = _ORDERS[group.order]
    delivery = group.delivery.replace("_", " ")
    parts.append(f"<p class='soft'>{_escaped(group.kind)}, {_escaped(delivery)}, {promised}</p>")
    plot = line_plot([each.time for each in group.lag], [each.lag for each in group.lag], "lag over time")
    parts.append(f"<h4>Lag over time</h4>{plot}" if plot else "")
    if group.latency is not None:
        named = (("50 %", "p50"), ("90 %", "p90"), ("99 %", "p99"), ("99.9 %", "p999"), ("all", "max"))
        bars = [(name, getattr(group.latency, field)) for name, field in named]
        parts.append(f"<h4>From send to first ack</h4>{bar_plot(bars, 'latency percentiles', _format_seconds)}")
    if group.redelivered:
        again = [(cause.replace("_", " "), float(count)) for cause, count in group.redelivered.items()]
        parts.append(f"<h4>Redelivered after</h4>{bar_plot(again, 'redeliveries by cause')}")
    if group.deaths:
        rows = [(each.type or "no longer stored", each.handler or "", f"{each.count:,}") for each in group.deaths]
        parts.append(f"<h4>Dead letters by reason</h4>{_table(('type', 'handler', 'messages'), rows)}")
    return "".join(parts)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_escaped(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{_escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='scroll'><table class='text'><tr>{head}</tr>{body}</table></div>"


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{_escaped(item)}</li>' for item in items)}</ul>"


def _escaped(text: str) -> str:
    return html.escape(text)


def _format_time(micros: int) -> str:
    return datetime.fromtimestamp(micros / 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _format_seconds(seconds: float) -> str:
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 0.001)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
