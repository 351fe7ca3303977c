"""``plait doctor``: checks a data directory and prints the findings with advice. Changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from plait.cli.options import Output, described
from plait.cli.output import console, format_micros, format_size, print_facts, print_json
from plait.cli.progress import ProgressSteps
from plait.doctor import CheckReport, Finding, examine
from plait.doctor.findings import LogFacts
from plait.errors import DamageError
from plait.model.names import counted


def doctor(
    data: Annotated[Path, described("The data directory, in use or not.")],
    /,
    *,
    output: Output = "table",
) -> int:
    """Check a data directory for damage; exit code 8 if there is any."""
    with ProgressSteps() as steps:
        step = ""

        def on_step(name: str, done: int, total: int) -> None:
            nonlocal step
            if name != step:
                step = name
                steps.step(f"checking the {name}", total, "bytes")
            steps.update(done)

        report = examine(data, on_step)
    if output == "json":
        print_json(report)
    else:
        _print(report)
    return 0 if report.healthy else DamageError.exit_code


def _print(report: CheckReport) -> None:
    message, retained, action = report.message_log, report.retained_log, report.action_log
    print_facts(
        [
            ("directory", report.path),
            (
                "in use",
                "yes, by a server; what it writes during the check is not examined" if report.in_use else "no",
            ),
            ("format", f"version {report.format_version}"),
            ("checkpoints", _checkpoints(report)),
            (
                "message log",
                f"{_extent(message)}, {counted(message.rows, 'message')} of {counted(report.subjects, 'subject')}",
            ),
            (
                "retained log",
                f"{_extent(retained)}, {retained.rows:,} dead letters and retained messages, finished or not",
            ),
            (
                "action log",
                f"{_extent(action)}, {action.rows:,} events and definitions",
            ),
            (
                "consume logs",
                f"{report.consume_logs - report.consume_logs_damaged:,} of {report.consume_logs:,} match the messages",
            ),
            ("missing", counted(report.missing_messages, "message")),
            ("quarantine", counted(len(report.quarantine), "file") if report.quarantine else "empty"),
        ]
    )
    out = console()
    for finding in report.findings:
        style = "bold red" if finding.severity == "damaged" else "bold"
        out.print()
        out.print(f"{finding.severity}: {finding.part}, {_place(finding)}", style=style, markup=False, soft_wrap=True)
        print_facts([("  what", finding.what), ("  harm", finding.harm), ("  do", finding.advice)])
    out.print()
    damaged = sum(finding.severity == "damaged" for finding in report.findings)
    if report.healthy:
        out.print("healthy", style="bold green")
    else:
        out.print(f"damaged: {counted(damaged, 'finding')}", style="bold red")


def _extent(log: LogFacts) -> str:
    files, frames = counted(log.segments, "file"), counted(log.frames, "frame")
    return f"{files}, offsets {log.start:,} to {log.end:,}, {frames}"


def _checkpoints(report: CheckReport) -> str:
    found = report.checkpoints
    newest = next((facts for facts in found if facts.whole), None)
    if newest is None:
        return f"{len(found)}, none of them whole" if found else "none"
    assert newest.time is not None
    broken = sum(not facts.whole for facts in found)
    how = "of an orderly stop" if newest.clean else "of a running server"
    return (
        f"{len(found)}, {f'{broken} not whole' if broken else 'all whole'}; a start would use "
        f"number {newest.number}, {how}, {format_micros(newest.time)}, epoch {newest.epoch}"
    )


def _place(finding: Finding) -> str:
    where = finding.file
    if finding.offset is not None:
        where += f", byte {finding.offset:,}"
    if finding.size is not None:
        where += f", {format_size(finding.size)}"
    return where
