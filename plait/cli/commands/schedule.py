"""``plait schedule``: lists, counts, cancels and moves delayed messages."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from plait.cli.event_loop import with_client
from plait.cli.options import DEFAULT_SERVER, Output, Partition, Server, delay_of, time_of
from plait.cli.output import format_size, format_time_exactly, print_facts, print_json, print_table, printable
from plait.errors import InvalidArgument, NotScheduled

if TYPE_CHECKING:
    from plait.client.admin.schedule_admin import ScheduledMessage
    from plait.client.client import Client

app = App(name="schedule", help="List, count, cancel and move delayed messages.")

Subject = Annotated[str, Parameter(help="The subject.")]
Number = Annotated[int, Parameter(help="The message's number in the schedule, as `plait schedule list` shows it.")]
At = Annotated[str, Parameter(help="The message's due time, as `plait schedule list` shows it.")]
Start = Annotated[
    str | None,
    Parameter(allow_leading_hyphen=True, help="Due at or after: 5m from now, or a time such as 2025-01-31T12:00."),
]
End = Annotated[str | None, Parameter(allow_leading_hyphen=True, help="Due before; as --start.")]


@app.command(name="list")
def list_scheduled(
    subject: Subject,
    /,
    *,
    start: Start = None,
    end: End = None,
    limit: Annotated[int, Parameter(help="List at most this many.")] = 100,
    partition: Partition = None,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """List a subject's delayed messages, the next due first."""
    found = with_client(
        server,
        lambda client: client.admin.scheduled(subject, partition=partition, start=start, end=end, limit=limit),
    )
    if output == "json":
        print_json([_fields(message) for message in found])
        return
    columns = ("number", "deliver at", "key", "size", "message id", "partition")
    rows = (
        (
            str(message.number),
            format_time_exactly(message.deliver_at),
            "-" if message.key is None else printable(message.key),
            format_size(message.size),
            str(message.message_id),
            str(message.partition),
        )
        for message in found
    )
    print_table(columns, rows, right=("number", "size"))
    if len(found) == limit:
        sys.stderr.write(f"the first {limit}; --limit shows more\n")


@app.command
def count(
    subject: Annotated[str | None, Parameter(help="Only messages of this subject.")] = None,
    /,
    *,
    start: Start = None,
    end: End = None,
    by: Annotated[Literal["subject", "time"], Parameter(help="Count per subject or per time.")] = "subject",
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """Count the delayed messages."""
    counts = with_client(server, lambda client: client.admin.schedule_counts(subject, start=start, end=end, by=by))
    if output == "json":
        print_json(counts)
        return
    columns = ("subject" if by == "subject" else "deliver from", "messages")
    rows = (
        (c.subject or "-" if by == "subject" or c.time is None else format_time_exactly(c.time), f"{c.count:,}")
        for c in counts
    )
    print_table(columns, rows, right=columns[1:])


@app.command
def cancel(
    subject: Subject,
    number: Number,
    deliver_at: At,
    /,
    *,
    partition: Partition = None,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """Cancel a delayed message: it is never delivered."""
    at = time_of(deliver_at)

    async def work(client: Client) -> None:
        if not await client.admin.cancel_scheduled(subject, number, at, partition=partition):
            raise NotScheduled(
                f"number {number} of {subject!r} is not scheduled for {format_time_exactly(at)}, or no longer",
                subject=subject,
                number=number,
            )

    with_client(server, work)
    if output == "json":
        print_json({"subject": subject, "number": number, "deliver_at": at, "cancelled": True})
    else:
        sys.stderr.write(f"cancelled number {number} of {subject}\n")


@app.command
def move(
    subject: Subject,
    number: Number,
    deliver_at: At,
    /,
    *,
    delay: Annotated[str | None, Parameter(help="This long from now: 10s, 5m, level3.")] = None,
    to: Annotated[str | None, Parameter(help="At this time, such as 2025-01-31T12:00.")] = None,
    partition: Partition = None,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """Deliver a message at another time."""
    from plait.client.arguments import to_datetime
    from plait.client.send.due_time import due_of

    if (delay is None) == (to is None):
        raise InvalidArgument("use --delay or --to for the new time: exactly one of them")
    at = time_of(deliver_at)
    now = -(-time.time_ns() // 1000)
    due = to_datetime(due_of(None if delay is None else delay_of(delay), None if to is None else time_of(to), now))
    new = with_client(server, lambda client: client.admin.reschedule(subject, number, at, to=due, partition=partition))
    if output == "json":
        print_json({"subject": subject, "number": new, "deliver_at": due})
    else:
        print_facts([("subject", subject), ("number", str(new)), ("deliver at", format_time_exactly(due))])


def _fields(message: ScheduledMessage) -> dict[str, Any]:
    return {
        "subject": message.subject,
        "partition": str(message.partition),
        "number": message.number,
        "deliver_at": message.deliver_at,
        "message_id": str(message.message_id),
        "key": message.key,
        "size": message.size,
    }
