"""``plait dlq``: lists the dead letters of groups and their reasons, resends and purges them."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from plait.cli.event_loop import with_client
from plait.cli.options import DEFAULT_SERVER, Output, Partition, Server, Yes
from plait.cli.output import (
    format_size,
    format_time,
    print_facts,
    print_json,
    print_table,
    printable,
    shortened,
    shown_body,
    text_or_base64,
)
from plait.cli.progress import ProgressSteps
from plait.errors import InvalidArgument, PlaitError
from plait.model.names import counted

if TYPE_CHECKING:
    from plait.client.admin.dead_letter_admin import DeadLetter
    from plait.client.client import Client

app = App(name="dlq", help="List, show, resend and purge dead letters.")

Subject = Annotated[str, Parameter(help="The subject.")]
Group = Annotated[str, Parameter(help="The group whose messages died.")]
Type = Annotated[str | None, Parameter(name="--type", help="Only letters with this type of error.")]
Handler = Annotated[str | None, Parameter(help="Only letters of this handler.")]
Before = Annotated[
    str | None,
    Parameter(allow_leading_hyphen=True, help="Only letters that died before -5m, or a time such as 2025-01-31T12:00."),
]
DryRun = Annotated[bool, Parameter(help="Only count them.", show_default=False)]
All = Annotated[bool, Parameter(name="--all", help="Every letter of the group.", show_default=False)]
Rate = Annotated[float | None, Parameter(help="At most this many per second.")]

#: Characters of a reason in a listing.
TEXT_WIDTH = 60
#: The default of ``--limit``.
LIMIT = 100


@app.command(name="list")
def list_letters(
    subject: Annotated[str | None, Parameter(help="Only the groups of this subject.")] = None,
    group: Annotated[str | None, Parameter(help="List this group's letters.")] = None,
    /,
    *,
    limit: Annotated[int | None, Parameter(help=f"List at most this many letters; default {LIMIT}.")] = None,
    error_type: Type = None,
    handler: Handler = None,
    before: Before = None,
    partition: Partition = None,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """List the groups that have dead letters, or a group's letters."""
    if subject is None or group is None:
        given = {
            "--limit": limit,
            "--type": error_type,
            "--handler": handler,
            "--before": before,
            "--partition": partition,
        }
        for option, value in given.items():
            if value is not None:
                raise InvalidArgument(f"{option} selects letters of one group; name the group too")
        _list_queues(subject, server, output)
        return
    select = _select((), error_type, handler, before)
    limit = LIMIT if limit is None else limit
    letters = with_client(
        server,
        lambda client: client.admin.dead_letters(subject, group, partition=partition, limit=limit, **select),
    )
    if output == "json":
        print_json([fields_of(letter) for letter in letters])
        return
    columns = ("sequence", "died", "attempts", "type", "handler", "reason", "key", "size", "message id", "partition")
    rows = (
        (
            str(letter.sequence),
            format_time(letter.last_time),
            str(letter.attempts),
            printable(letter.reason.type),
            printable(letter.reason.handler),
            shortened(printable(letter.reason.text), TEXT_WIDTH),
            "-" if letter.key is None else printable(letter.key),
            format_size(letter.size),
            str(letter.message_id),
            str(letter.partition),
        )
        for letter in letters
    )
    print_table(columns, rows, right=("sequence", "attempts", "size"))
    if len(letters) == limit:
        sys.stderr.write(f"the first {limit}; --limit shows more\n")


def _list_queues(subject: str | None, server: str, output: str) -> None:
    queues = with_client(server, lambda client: client.admin.dead_queues(subject))
    if output == "json":
        print_json(queues)
        return
    columns = ("subject", "group", "dead letters")
    print_table(columns, ((q.subject, q.group, f"{q.count:,}") for q in queues), right=columns[2:])


@app.command
def show(
    subject: Subject,
    group: Group,
    sequence: Annotated[int, Parameter(help="The letter's sequence.")],
    /,
    *,
    partition: Partition = None,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """Show everything about one dead letter."""
    letter = with_client(server, lambda client: client.admin.dead_letter(subject, group, sequence, partition=partition))
    if output == "json":
        print_json(fields_of(letter))
        return
    headers = "  ".join(f"{printable(name)}={printable(str(value))}" for name, value in letter.headers.items())
    print_facts(
        [
            ("subject", letter.subject),
            ("group", letter.group),
            ("partition", str(letter.partition)),
            ("sequence", str(letter.sequence)),
            ("message id", str(letter.message_id)),
            ("key", "-" if letter.key is None else printable(letter.key)),
            ("tags", ", ".join(map(printable, letter.tags)) or "-"),
            ("headers", headers or "-"),
            ("sent", "-" if letter.send_time is None else format_time(letter.send_time)),
            ("stored", format_time(letter.store_time)),
            ("attempts", str(letter.attempts)),
            ("first failed", format_time(letter.first_time)),
            ("died", format_time(letter.last_time)),
            ("reason", printable(str(letter.reason))),
            *(
                ("died before", f"{format_time(h.time)} after {h.attempts} attempts: {printable(str(h.reason))}")
                for h in letter.history
            ),
            ("size", format_size(letter.size)),
            ("body", shown_body(letter.body or b"")),
        ]
    )


@app.command
def reasons(
    subject: Subject,
    group: Group,
    /,
    *,
    partition: Partition = None,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """Count a group's dead letters by reason."""
    found = with_client(server, lambda client: client.admin.dead_reasons(subject, group, partition=partition))
    if output == "json":
        print_json(found)
        return
    columns = ("dead letters", "type", "handler", "first", "last", "for example")
    rows = (
        (
            f"{reason.count:,}",
            printable(reason.type) or "-",
            printable(reason.handler) or "-",
            format_time(reason.first_time),
            format_time(reason.last_time),
            shortened(printable(reason.text), TEXT_WIDTH),
        )
        for reason in found
    )
    print_table(columns, rows, right=columns[:1])


@app.command
def resend(
    subject: Subject,
    group: Group,
    /,
    *sequences: Annotated[int, Parameter(help="Only these letters.")],
    error_type: Type = None,
    handler: Handler = None,
    before: Before = None,
    rate: Rate = None,
    every: All = False,
    dry_run: DryRun = False,
    partition: Partition = None,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """Deliver dead letters again, to their group only."""
    select = _selected("resend", every, _select(sequences, error_type, handler, before))
    work = DeadLetterRun("resend", subject, group, select, rate, partition, dry_run=dry_run, json=output == "json")
    with_client(server, work.run)


@app.command
def purge(
    subject: Subject,
    group: Group,
    /,
    *sequences: Annotated[int, Parameter(help="Only these letters.")],
    error_type: Type = None,
    handler: Handler = None,
    before: Before = None,
    rate: Rate = None,
    every: All = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    partition: Partition = None,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """Delete dead letters permanently."""
    select = _selected("purge", every, _select(sequences, error_type, handler, before))
    if not yes and not dry_run:
        if not sys.stdin.isatty():
            raise InvalidArgument(
                f"purging dead letters of {group!r} cannot be undone; confirm with --yes, or count with --dry-run"
            )
        what = "all" if every else "the selected"
        sys.stderr.write(f"permanently purge {what} dead letters of {group!r}? Type the group's name to confirm: ")
        sys.stderr.flush()
        if sys.stdin.readline().strip() != group:
            raise InvalidArgument(f"nothing was purged: the name typed is not {group!r}")
    work = DeadLetterRun("purge", subject, group, select, rate, partition, dry_run=dry_run, json=output == "json")
    with_client(server, work.run)


class DeadLetterRun:
    """One run of resend or purge."""

    def __init__(
        self,
        what: str,
        subject: str,
        group: str,
        select: dict[str, Any],
        rate: float | None,
        partition: str | None,
        *,
        dry_run: bool,
        json: bool,
    ) -> None:
        self._what = what
        self._subject = subject
        self._group = group
        self._select = select
        self._rate = rate
        self._partition = partition
        self._dry_run = dry_run
        self._json = json
        self._count = 0

    async def run(self, client: Client) -> None:
        """Resend or purge, show the progress and print the result."""
        done = "resent" if self._what == "resend" else "purged"
        work = client.admin.resend_dead if self._what == "resend" else client.admin.purge_dead
        queues = await client.admin.dead_queues(self._subject)
        total = next((queue.count for queue in queues if queue.group == self._group), 0)
        try:
            with ProgressSteps() as steps:
                steps.step(
                    f"{self._what} dead letters of {self._group}", None if self._select or self._partition else total
                )

                def progress(count: int) -> None:
                    self._count = count
                    steps.update(count)

                count = await work(
                    self._subject,
                    self._group,
                    partition=self._partition,
                    rate=self._rate,
                    dry_run=self._dry_run,
                    progress=progress,
                    **self._select,
                )
        except (PlaitError, asyncio.CancelledError):
            # Ctrl-C cancels.
            self._print_partial(done)
            raise
        if self._json:
            print_json({"subject": self._subject, "group": self._group, "dry_run": self._dry_run, done: count})
            return
        print_facts(
            [
                ("subject", self._subject),
                ("group", self._group),
                (f"would be {done}" if self._dry_run else done, f"{count:,}"),
            ]
        )

    def _print_partial(self, done: str) -> None:
        """Print how many letters are done at least. The result of the last request is not known."""
        if self._count and not self._dry_run:
            sys.stderr.write(f"at least {counted(self._count, 'dead letter')} {done}; run again for the rest\n")


def _select(
    sequences: tuple[int, ...], error_type: str | None, handler: str | None, before: str | None
) -> dict[str, Any]:
    """The selection, as keyword arguments of the client."""
    from plait.client.arguments import moment_of, to_datetime

    select: dict[str, Any] = {}
    if sequences:
        select["sequences"] = sequences
    if error_type is not None:
        select["type"] = error_type
    if handler is not None:
        select["handler"] = handler
    if before is not None:
        now = time.time_ns() // 1000
        moment = moment_of(before, "--before", now)
        assert moment is not None
        if moment > now:
            # A time in the future would select every letter, although the user asked for a part of them.
            raise InvalidArgument(
                f"--before {before} is in the future; write -7d for seven days ago, or a time in the past"
            )
        select["before"] = to_datetime(moment)
    return select


def _selected(what: str, every: bool, select: dict[str, Any]) -> dict[str, Any]:
    """Check the selection: all letters must be selected explicitly."""
    if every and select:
        raise InvalidArgument("use --all or select letters, not both")
    if not every and not select:
        raise InvalidArgument(f"select the letters to {what}: by sequence, --type, --handler, --before, or --all")
    return select


def fields_of(letter: DeadLetter) -> dict[str, Any]:
    """A letter as JSON fields. A body that is not UTF-8 is in ``body_base64`` instead of ``body``."""
    fields: dict[str, Any] = {
        "subject": letter.subject,
        "group": letter.group,
        "partition": str(letter.partition),
        "sequence": letter.sequence,
        "message_id": str(letter.message_id),
        "key": letter.key,
        "tags": letter.tags,
        "headers": letter.headers,
        "size": letter.size,
        "send_time": letter.send_time,
        "store_time": letter.store_time,
        "attempts": letter.attempts,
        "first_time": letter.first_time,
        "last_time": letter.last_time,
        "reason": _reason(letter.reason),
        "history": [{"attempts": h.attempts, "time": h.time, "reason": _reason(h.reason)} for h in letter.history],
    }
    if letter.body is not None:
        fields |= text_or_base64(letter.body)
    return fields


def _reason(reason: Any) -> dict[str, str]:
    return {"type": reason.type, "text": reason.text, "handler": reason.handler}
