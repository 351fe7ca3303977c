"""``plait dlq``: lists the dead letters of groups and their reasons, resends and purges them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from cyclopts import App, Parameter

from plait.cli.options import NODE, NodeOptions, Partition, Yes, described, flag, signed
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

Subject = Annotated[str, described("The subject.")]
Group = Annotated[str, described("The group whose messages died.")]


@Parameter(name="*")
@dataclass(frozen=True)
class LetterOptions:
    """The options that select dead letters of a group."""

    error_type: Annotated[str | None, Parameter(name="--type", help="Only letters with this type of error.")] = None
    handler: Annotated[str | None, described("Only letters of this handler.")] = None
    before: Annotated[
        str | None,
        signed("Only letters that died before this time: -5m (five minutes ago), or one such as 2025-01-31T12:00."),
    ] = None
    partition: Partition = None

    def selected(self) -> dict[str, Any]:
        """The selection, as keyword arguments of the client. It has no partition."""
        from plait.client.arguments import moment_of, to_datetime

        found: dict[str, Any] = {"type": self.error_type, "handler": self.handler}
        if self.before is not None:
            now = time.time_ns() // 1000
            moment = moment_of(self.before, "--before", now)
            assert moment is not None
            if moment > now:
                # A time in the future would select every letter, although the user asked for a part of them.
                raise InvalidArgument(
                    f"--before {self.before} is in the future; write -7d for seven days ago, or a time in the past"
                )
            found["before"] = to_datetime(moment)
        return {name: value for name, value in found.items() if value is not None}


@Parameter(name="*")
@dataclass(frozen=True)
class LetterWorkOptions(LetterOptions):
    """The options of ``resend`` and ``purge``."""

    rate: Annotated[float | None, described("The most letters per second.")] = None
    every: Annotated[bool, Parameter(name="--all", help="Every letter of the group.", show_default=False)] = False
    dry_run: Annotated[bool, flag("Count the letters and change nothing.")] = False


LETTERS: Final = LetterOptions()
WORK: Final = LetterWorkOptions()
Sequences = Annotated[int, described("Only these letters.")]

#: The default of ``--limit``.
LIMIT = 100


@app.command(name="list")
def list_letters(
    subject: Annotated[str | None, described("Only the groups of this subject.")] = None,
    group: Annotated[str | None, described("List this group's letters.")] = None,
    /,
    *,
    limit: Annotated[int | None, described(f"List at most this many letters; default {LIMIT}.")] = None,
    letters: LetterOptions = LETTERS,
    node: NodeOptions = NODE,
) -> None:
    """List the groups that have dead letters, or a group's letters."""
    if subject is None or group is None:
        given = {
            "--limit": limit,
            "--type": letters.error_type,
            "--handler": letters.handler,
            "--before": letters.before,
            "--partition": letters.partition,
        }
        for option, value in given.items():
            if value is not None:
                raise InvalidArgument(f"{option} selects letters of one group; name the group too")
        queues = node.run(lambda client: client.admin.dead_queues(subject))
        of_groups: dict[str, Callable[[DeadQueue], str]] = {
            "subject": lambda queue: queue.subject,
            "group": lambda queue: queue.group,
            "dead letters": lambda queue: f"{queue.count:,}",
        }
        print_rows(queues, of_groups, node.output, right=("dead letters",))
        return
    select = letters.selected()
    limit = LIMIT if limit is None else limit
    found = node.run(
        lambda client: client.admin.dead_letters(subject, group, partition=letters.partition, limit=limit, **select)
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
    print_rows(found, columns, node.output, right=("sequence", "attempts", "size"), fields=fields_of)
    if node.output != "json" and len(found) == limit:
        sys.stderr.write(f"these are the first {limit} letters; there may be more, see --limit\n")


@app.command
def show(
    subject: Subject,
    group: Group,
    sequence: Annotated[int, described("The letter's sequence.")],
    /,
    *,
    partition: Partition = None,
    node: NodeOptions = NODE,
) -> None:
    """Show everything about one dead letter."""
    letter = node.run(lambda client: client.admin.dead_letter(subject, group, sequence, partition=partition))
    headers = "  ".join(f"{name}={value}" for name, value in letter.headers.items())
    print_result(
        node.output,
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
                ("earlier death", f"{format_time(h.time)} after {h.attempts} attempts: {h.reason}")
                for h in letter.history
            ),
            ("size", format_size(letter.size)),
            ("body", shown_body(letter.body or b"")),
        ],
    )


@app.command
def reasons(subject: Subject, group: Group, /, *, partition: Partition = None, node: NodeOptions = NODE) -> None:
    """Count a group's dead letters by reason."""
    found = node.run(lambda client: client.admin.dead_reasons(subject, group, partition=partition))
    columns: dict[str, Callable[[DeadReason], str]] = {
        "dead letters": lambda reason: f"{reason.count:,}",
        "type": lambda reason: reason.type or "-",
        "handler": lambda reason: reason.handler or "-",
        "first": lambda reason: format_time(reason.first_time),
        "last": lambda reason: format_time(reason.last_time),
        "for example": lambda reason: shortened(reason.text),
    }
    print_rows(found, columns, node.output, right=("dead letters",))


@app.command
def resend(
    subject: Subject,
    group: Group,
    /,
    *sequences: Sequences,
    letters: LetterWorkOptions = WORK,
    node: NodeOptions = NODE,
) -> None:
    """Deliver dead letters again, to their group only."""
    _work("resend", subject, group, _selection("resend", sequences, letters), letters, node)


@app.command
def purge(
    subject: Subject,
    group: Group,
    /,
    *sequences: Sequences,
    letters: LetterWorkOptions = WORK,
    yes: Yes = False,
    node: NodeOptions = NODE,
) -> None:
    """Delete dead letters permanently."""
    select = _selection("purge", sequences, letters)
    if not yes and not letters.dry_run:
        if not sys.stdin.isatty():
            raise InvalidArgument(
                f"purging dead letters of {group!r} cannot be undone; confirm with --yes, or count with --dry-run"
            )
        what = "all" if letters.every else "the selected"
        where = f" in partition {letters.partition}" if letters.partition else ""
        sys.stderr.write(
            f"permanently purge {what} dead letters of group {group!r} of {subject!r}{where}? "
            "Type the group's name to confirm: "
        )
        sys.stderr.flush()
        if sys.stdin.readline().strip() != group:
            raise InvalidArgument(f"nothing was purged: the name typed is not {group!r}")
    _work("purge", subject, group, select, letters, node)


def _selection(what: str, sequences: tuple[int, ...], letters: LetterWorkOptions) -> dict[str, Any]:
    """The selection as keyword arguments of the client. An empty one selects all letters, and needs ``--all``."""
    select = letters.selected() | ({"sequences": sequences} if sequences else {})
    if letters.every and select:
        raise InvalidArgument("use --all or select letters, not both")
    if not letters.every and not select:
        raise InvalidArgument(f"select the letters to {what}: by sequence, --type, --handler, --before, or --all")
    return select


def _work(
    what: Literal["resend", "purge"],
    subject: str,
    group: str,
    select: dict[str, Any],
    letters: LetterWorkOptions,
    node: NodeOptions,
) -> None:
    """Resend or purge, show the progress and print the result."""
    done = "resent" if what == "resend" else "purged"
    #: How many letters are done at least.
    least = 0

    async def run(client: Client) -> int:
        work = client.admin.resend_dead if what == "resend" else client.admin.purge_dead
        queues = await client.admin.dead_queues(subject)
        total = next((queue.count for queue in queues if queue.group == group), 0)
        with ProgressSteps() as steps:
            steps.step(f"{what} dead letters of {group}", None if select or letters.partition else total)

            def progress(count: int) -> None:
                nonlocal least
                least = count
                steps.update(count)

            return await work(
                subject,
                group,
                partition=letters.partition,
                rate=letters.rate,
                dry_run=letters.dry_run,
                progress=progress,
                **select,
            )

    try:
        count = node.run(run)
    except (PlaitError, KeyboardInterrupt):
        # The result of the last request is not known.
        if least and not letters.dry_run:
            sys.stderr.write(f"at least {counted(least, 'dead letter')} {done}; run again for the rest\n")
        raise
    facts = [("subject", subject), ("group", group)]
    facts.append((f"would be {done}" if letters.dry_run else done, f"{count:,}"))
    print_result(node.output, {"subject": subject, "group": group, "dry_run": letters.dry_run, done: count}, facts)


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
