"""``plait spark archive``: archives the first-hand logs of a data directory as Parquet files, once or periodically."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from plait.cli.options import Output, described, duration_of, flag
from plait.cli.output import format_size, print_json, print_json_line
from plait.cli.progress import ProgressSteps
from plait.errors import ArchiveConflict, ArchiveError, Expired, InvalidArgument, PlaitError
from plait.model.names import counted

if TYPE_CHECKING:
    from plait.spark import ArchiveReport

#: The least of ``--every``: more frequent runs would mostly find nothing new.
EVERY_SECONDS_MIN = 1.0
#: The longest wait after failed runs, unless ``--every`` is longer. The wait doubles with each failure.
FAILED_SECONDS_MAX = 600.0


def archive(
    *,
    to: Annotated[str, described("The archive: a directory, or a URI (s3://, hdfs://, gs://).")],
    data: Annotated[str | None, described("The data directory, in use by a server or not.")] = None,
    subject: Annotated[
        list[str] | None,
        Parameter(help="Only this subject, or a prefix and *; may be repeated.", consume_multiple=False),
    ] = None,
    now: Annotated[bool, flag("Archive up to the end of the logs, not only full segments.")] = False,
    raw: Annotated[bool, flag("Copy segment files as they are, instead of making Parquet files.")] = False,
    follow: Annotated[bool, flag("Repeat until Ctrl-C.")] = False,
    every: Annotated[str, described("With --follow: the wait between two runs.")] = "60s",
    compact: Annotated[bool, flag("Also merge small files of one subject and day.")] = False,
    verify: Annotated[bool, flag("Also read back the whole archive and compare it.")] = False,
    skip_damage: Annotated[bool, flag("Skip damaged frames and note them in the manifest.")] = False,
    group: Annotated[str, described("The broker group of the data; partition names include it.")] = "g1",
    master: Annotated[str | None, described("The Spark master; default: this machine's cores.")] = None,
    output: Output = "table",
) -> None:
    """Archive what is new in a data directory; without --data, compact and verify an archive."""
    seconds = duration_of(every)
    if follow and data is None:
        raise InvalidArgument("--follow needs --data DIR: an archive alone does not grow")
    if seconds < EVERY_SECONDS_MIN:
        raise InvalidArgument(f"--every {every} is too short: use {EVERY_SECONDS_MIN:g}s or more")
    from plait.spark.archiving import archiver as archiving

    def once() -> None:
        with ProgressSteps() as steps:
            report = archiving.archive(
                data,
                to,
                master=master,
                group=group,
                subjects=subject or (),
                now=now,
                raw=raw,
                compact=compact,
                verify=verify,
                skip_damage=skip_damage,
                progress=steps,
            )
        _print_report(report, output, follow)

    if follow:
        _repeat(once, seconds)
    else:
        once()


def _repeat(once: Callable[[], None], seconds: float) -> None:
    """Repeat until Ctrl-C. An ``ArchiveError`` ends it only if no run has succeeded yet."""
    worked = False
    wait = seconds
    while True:
        following = seconds
        try:
            once()
            worked, wait = True, seconds
        except (ArchiveConflict, Expired) as error:
            # Another archiver or retention was faster; the next run continues from there.
            wait = seconds
            _warn(error, wait)
        except ArchiveError as error:
            # Storage that does not respond, a full disk, a Spark crash: an earlier run succeeded, so the next one may.
            if not worked:
                raise
            _warn(error, wait)
            following = max(seconds, min(2 * wait, FAILED_SECONDS_MAX))
        pause(wait)
        wait = following


def _warn(error: PlaitError, seconds: float) -> None:
    sys.stderr.write(f"warning: {error.message}; the next run starts in {seconds:g} s\n")


def pause(seconds: float) -> None:
    time.sleep(seconds)


def _print_report(report: ArchiveReport, output: str, follow: bool) -> None:
    if output == "json":
        (print_json_line if follow else print_json)(report)
    else:
        print(_sentence(report))
    sys.stdout.flush()
    if report.gaps or report.left_out:
        sys.stderr.write(
            f"warning: {counted(report.gaps, 'gap')} in sequences, damaged or lost ranges: {report.left_out}; "
            f"the manifest in {report.archive}/_plait lists them\n"
        )


def _sentence(report: ArchiveReport) -> str:
    parts = []
    if report.messages or report.events or report.deaths:
        messages, events = counted(report.messages, "message"), counted(report.events, "event")
        what = f"{messages} and {events}"
        if report.deaths:
            what = f"{messages}, {events} and {counted(report.deaths, 'death')}"
        parts.append(
            f"{what} archived in {counted(report.files, 'file')}, "
            f"{format_size(report.size)} from {format_size(report.log_size)} of log"
        )
    if report.segments:
        parts.append(f"{counted(report.segments, 'segment')} copied, {format_size(report.size)}")
    if report.merged:
        parts.append(f"{counted(report.merged, 'small file')} merged")
    if report.verified:
        parts.append(f"{counted(report.verified, 'file')} read back and found whole")
    if not parts:
        parts.append("nothing new")
    return f"{'; '.join(parts)} ({report.seconds:.1f} s, manifest {report.manifest})"
