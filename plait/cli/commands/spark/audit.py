"""``plait spark audit``: checks in the logs whether every promise was kept. Exit code 0: yes, 1: no, 2: not known."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from plait.cli.options import Output, described, signed
from plait.cli.output import console, format_micros, print_facts, print_json, print_table
from plait.cli.progress import ProgressSteps
from plait.errors import InvalidArgument, PlaitError

if TYPE_CHECKING:
    from plait.spark.auditing.report import AuditReport, GroupAudit, SubjectAudit

EXIT_HELD: Final = 0
EXIT_BROKEN: Final = 1
EXIT_UNKNOWN: Final = 2


def audit(
    *,
    data: Annotated[Path | None, described("A data directory, in use or not.")] = None,
    archive: Annotated[str | None, described("An archive that 'plait spark archive' made.")] = None,
    subject: Annotated[list[str] | None, described("Only this subject, or prefix*; may be repeated.")] = None,
    group: Annotated[list[str] | None, described("Only this consumer group; may be repeated.")] = None,
    since: Annotated[
        str | None,
        signed("Messages stored at or after: -2h before now, or 2025-01-31T12:00."),
    ] = None,
    until: Annotated[str | None, signed("Messages stored before; as --since.")] = None,
    output: Output = "table",
    parquet: Annotated[Path | None, described("Write tables of the report into this new directory.")] = None,
    html: Annotated[Path | None, described("Write the report as one page with plots.")] = None,
    broker_group: Annotated[str, described("The broker group, as in partition names.")] = "g1",
    skip_damage: Annotated[bool, described("Skip damaged frames and count their messages as missing.")] = False,
    master: Annotated[str | None, described("The Spark master; default: two threads of this machine.")] = None,
) -> int:
    """Check in the logs whether every promise was kept; exit code 0: yes, 1: no, 2: not known."""
    import plait.spark

    def run() -> AuditReport:
        _check_files(parquet, html)
        with ProgressSteps() as steps:
            report = plait.spark.audit(
                data,
                archive=archive,
                subjects=subject or (),
                groups=group or (),
                since=since,
                until=until,
                broker_group=broker_group,
                skip_damage=skip_damage,
                master=master,
                progress=steps,
            )
        _write_files(report, parquet, html)
        return report

    report = _judged(run)
    if report is None:
        return EXIT_UNKNOWN
    if output == "json":
        print_json(report)
    else:
        _print(report)
    if not report.held:
        return EXIT_BROKEN
    return EXIT_HELD if report.judged else EXIT_UNKNOWN


def _judged(run: Callable[[], AuditReport]) -> AuditReport | None:
    """The report; None: an error, which is printed, prevented it. Python's own exit code for an error would be 1, which
    means here that a promise was broken."""
    try:
        return run()
    except PlaitError as error:
        message, code = error.message, error.code
    except OSError as error:
        message, code = str(error), "system"
    except Exception as error:  # noqa: BLE001 - any failure means that nothing was judged
        traceback.print_exc()
        message, code = f"the audit itself failed: {error!r}", "internal"
    sys.stderr.write(f"error: {' '.join(message.split())} ({code})\n")
    return None


def _check_files(parquet: Path | None, html: Path | None) -> None:
    if parquet is not None and parquet.exists():
        raise InvalidArgument(f"{parquet} exists already; name a new directory for --parquet")
    if html is not None and (html.is_dir() or not html.parent.is_dir()):
        raise InvalidArgument(f"{html} cannot be written; --html needs a file name in an existing directory")


def _write_files(report: AuditReport, parquet: Path | None, html: Path | None) -> None:
    if parquet is not None:
        from plait.spark.auditing.report_files import write_tables

        write_tables(report, parquet)
    if html is not None:
        from plait.spark.auditing.report_files import page

        html.write_text(page(report), encoding="utf-8")


# --- for people -----------------------------------------------------------------------------------


def _print(report: AuditReport) -> None:
    times = (
        f"{format_micros(report.time_min)} to {format_micros(report.time_max)}" if report.time_max else "no messages"
    )
    print_facts([("logs", report.place), ("times", times)])
    for subject in report.subjects:
        _print_subject(subject)
    out = console()
    out.print()
    for line in report.unknown():
        out.print(f"unknown: {line}", style="bold yellow", markup=False, soft_wrap=True)
    for line in report.broken():
        out.print(f"broken: {line}", style="bold red", markup=False, soft_wrap=True)
    if report.held and report.judged:
        out.print("every promise was kept", style="bold green")


def _print_subject(subject: SubjectAudit) -> None:
    console().print()
    print_facts(
        [
            ("subject", subject.subject),
            ("messages", f"{subject.messages:,}" + (f", {subject.missing:,} missing" if subject.missing else "")),
            (
                "partitions",
                f"{len(subject.partitions)}; the fullest has {subject.partition_skew:g} times the mean, the fullest "
                f"logical partition {subject.slot_skew:g} times",
            ),
            ("hot keys", ", ".join(f"{each.key} {each.count:,}" for each in subject.hot_keys[:5]) or "no keys"),
        ]
    )
    _print_groups(subject.groups)


def _print_groups(groups: Sequence[GroupAudit]) -> None:
    from plait.spark.auditing.report import format_seconds

    if not groups:
        return
    fates = ("messages", "acked", "dead", "expired", "filtered", "unacked")
    rows = []
    for group in groups:
        latency = group.latency
        rows.append(
            (
                group.group + (" (deleted)" if group.forgotten else ""),
                group.kind,
                *(f"{getattr(group, name):,}" for name in fates),
                f"{max((moment.lag for moment in group.lag), default=0):,}",
                format_seconds(latency.p50) if latency else "-",
                format_seconds(latency.p99) if latency else "-",
            )
        )
    columns = ("group", "kind", *fates, "lag at most", "p50", "p99")
    print_table(columns, rows, right=columns[2:])
    promises = ("lost", "invented", "double_acks", "delivered_twice", "out_of_order")
    faults = [
        (
            group.group,
            *(f"{getattr(group, name):,}" for name in promises),
            f"{group.retried:,}",
            f"{sum(group.redelivered.values()):,}",
        )
        for group in groups
    ]
    names = ("group", *(name.replace("_", " ") for name in promises), "failed", "redelivered")
    print_table(names, faults, right=names[1:])
    deaths = [(group.group, death) for group in groups for death in group.deaths]
    if deaths:
        letters = [(name, each.type or "not stored", each.handler or "", f"{each.count:,}") for name, each in deaths]
        print_table(("group", "reason", "handler", "messages"), letters, right=("messages",))
