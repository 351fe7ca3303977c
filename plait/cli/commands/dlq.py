"""``plait dlq``: lists the dead letters of groups and their reasons, resends and purges them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import App, Parameter

from plait.cli.event_loop import with_client
from plait.cli.options import DEFAULT_SERVER, Output, Partition, Server, Yes
from plait.cli.output import (
    format_size,
    format_time,
    print_result,
    print_rows,
    reason_fields,
    shortened,
    shown_body,
    text_or_base64,
)
from plait.cli.progress import ProgressSteps
from plait.errors import InvalidArgument, PlaitError
from plait.model.names import counted

if TYPE_CHECKING:
    from plait.client.admin.dead_letter_admin import DeadLetter, DeadReason
    from plait.client.client import Client
    from plait.wire.admin.dead_letters import DeadQueue

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
    columns: dict[str, Callable[[DeadLetter], str]] = {
        "sequence": lambda letter: str(letter.sequence),
        "died": lambda letter: format_time(letter.last_time),
        "attempts": lambda letter: str(letter.attempts),
        "type": lambda letter: letter.reason.type,
        "handler": lambda letter: letter.reason.handler,
        "reason": lambda letter: shortened(letter.reason.text),
        "key": lambda letter: "-" if letter.key is None else letter.key,
        "size": lambda letter: format_size(letter.size),
        "message id": lambda letter: str(letter.message_id),
        "partition": lambda letter: str(letter.partition),
    }
    print_rows(letters, columns, output, right=("sequence", "attempts", "size"), fields=fields_of)
    if output != "json" and len(letters) == limit:
        sys.stderr.write(f"the first {limit}; --limit shows more\n")


def _list_queues(subject: str | None, server: str, output: str) -> None:
    queues = with_client(server, lambda client: client.admin.dead_queues(subject))
    columns: dict[str, Callable[[DeadQueue], str]] = {
        "subject": lambda queue: queue.subject,
        "group": lambda queue: queue.group,
        "dead letters": lambda queue: f"{queue.count:,}",
    }
    print_rows(queues, columns, output, right=("dead letters",))


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
    headers = "  ".join(f"{name}={value}" for name, value in letter.headers.items())
    print_result(
        output,
        fields_of(letter),
        [
            ("subject", letter.subject),
            ("group", letter.group),
            ("partition", str(letter.partition)),
            ("sequence", str(letter.sequence)),
            ("message id", str(letter.message_id)),
            ("key", "-" if letter.key is None else letter.key),
            ("tags", ", ".join(letter.tags) or "-"),
            ("headers", headers or "-"),
            ("sent", "-" if letter.send_time is None else format_time(letter.send_time)),
            ("stored", format_time(letter.store_time)),
            ("attempts", str(letter.attempts)),
            ("first failed", format_time(letter.first_time)),
            ("died", format_time(letter.last_time)),
            ("reason", str(letter.reason)),
            *(
                ("died before", f"{format_time(h.time)} after {h.attempts} attempts: {h.reason}")
                for h in letter.history
            ),
            ("size", format_size(letter.size)),
            ("body", shown_body(letter.body or b"")),
        ],
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
    columns: dict[str, Callable[[DeadReason], str]] = {
        "dead letters": lambda reason: f"{reason.count:,}",
        "type": lambda reason: reason.type or "-",
        "handler": lambda reason: reason.handler or "-",
        "first": lambda reason: format_time(reason.first_time),
        "last": lambda reason: format_time(reason.last_time),
        "for example": lambda reason: shortened(reason.text),
    }
    print_rows(found, columns, output, right=("dead letters",))


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
    work = DeadLetterRun("resend", subject, group, select, rate, partition, dry_run, output)
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
    work = DeadLetterRun("purge", subject, group, select, rate, partition, dry_run, output)
    with_client(server, work.run)


class DeadLetterRun(msgspec.Struct):
    """One run of resend or purge."""

    what: Literal["resend", "purge"]
    subject: str
    group: str
    select: dict[str, Any]
    rate: float | None
    partition: str | None
    dry_run: bool
    output: str
    #: How many letters are done at least.
    count: int = 0

    async def run(self, client: Client) -> None:
        """Resend or purge, show the progress and print the result."""
        done = "resent" if self.what == "resend" else "purged"
        work = client.admin.resend_dead if self.what == "resend" else client.admin.purge_dead
        queues = await client.admin.dead_queues(self.subject)
        total = next((queue.count for queue in queues if queue.group == self.group), 0)
        try:
            with ProgressSteps() as steps:
                steps.step(
                    f"{self.what} dead letters of {self.group}", None if self.select or self.partition else total
                )

                def progress(count: int) -> None:
                    self.count = count
                    steps.update(count)

                count = await work(
                    self.subject,
                    self.group,
                    partition=self.partition,
                    rate=self.rate,
                    dry_run=self.dry_run,
                    progress=progress,
                    **self.select,
                )
        except (PlaitError, asyncio.CancelledError):
            # Ctrl-C cancels. The result of the last request is not known.
            if self.count and not self.dry_run:
                sys.stderr.write(f"at least {counted(self.count, 'dead letter')} {done}; run again for the rest\n")
            raise
        shown = (f"would be {done}" if self.dry_run else done, f"{count:,}")
        fields = {"subject": self.subject, "group": self.group, "dry_run": self.dry_run, done: count}
        print_result(self.output, fields, [("subject", self.subject), ("group", self.group), shown])


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
    fields = msgspec.structs.asdict(letter) | {
        "partition": str(letter.partition),
        "message_id": str(letter.message_id),
        "reason": reason_fields(letter.reason),
        "history": [
            {"attempts": h.attempts, "time": h.time, "reason": reason_fields(h.reason)} for h in letter.history
        ],
    }
    del fields["body"]
    return fields if letter.body is None else fields | text_or_base64(letter.body)
