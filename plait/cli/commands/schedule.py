"""``plait schedule``: lists, counts, cancels and moves delayed messages."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import App

from plait.cli.options import NODE, NodeOptions, Partition, delay_of, described, signed, time_of
from plait.cli.output import format_size, format_time_exactly, print_json, print_result, print_rows
from plait.errors import InvalidArgument, NotScheduled

if TYPE_CHECKING:
    from plait.client.admin.schedule_admin import ScheduleCount, ScheduledMessage
    from plait.client.client import Client

app = App(name="schedule", help="List, count, cancel and move delayed messages.")

Subject = Annotated[str, described("The subject.")]
Number = Annotated[int, described("The message's number in the schedule, as `plait schedule list` shows it.")]
At = Annotated[str, described("The message's due time, as `plait schedule list` shows it.")]
Start = Annotated[
    str | None,
    signed("Due at or after: 5m from now, or a time such as 2025-01-31T12:00."),
]
End = Annotated[str | None, signed("Due before; as --start.")]


@app.command(name="list")
def list_scheduled(
    subject: Subject,
    /,
    *,
    start: Start = None,
    end: End = None,
    limit: Annotated[int, described("List at most this many.")] = 100,
    partition: Partition = None,
    node: NodeOptions = NODE,
) -> None:
    """List a subject's delayed messages, the next due first."""
    found = node.run(
        lambda client: client.admin.scheduled(subject, partition=partition, start=start, end=end, limit=limit)
    )
    columns: dict[str, Callable[[ScheduledMessage], str]] = {
        "number": lambda message: str(message.number),
        "deliver at": lambda message: format_time_exactly(message.deliver_at),
        "key": lambda message: "-" if message.key is None else message.key,
        "size": lambda message: format_size(message.size),
        "message id": lambda message: str(message.message_id),
        "partition": lambda message: str(message.partition),
    }
    print_rows(found, columns, node.output, right=("number", "size"), fields=_fields)
    if node.output != "json" and len(found) == limit:
        sys.stderr.write(f"these are the first {limit} messages; there may be more, see --limit\n")


@app.command
def count(
    subject: Annotated[str | None, described("Only messages of this subject.")] = None,
    /,
    *,
    start: Start = None,
    end: End = None,
    by: Annotated[Literal["subject", "time"], described("Count per subject or per time.")] = "subject",
    node: NodeOptions = NODE,
) -> None:
    """Count the delayed messages."""
    counts = node.run(lambda client: client.admin.schedule_counts(subject, start=start, end=end, by=by))
    columns: dict[str, Callable[[ScheduleCount], str]] = {
        "subject" if by == "subject" else "deliver from": lambda c: (
            c.subject or "-" if by == "subject" or c.time is None else format_time_exactly(c.time)
        ),
        "messages": lambda c: f"{c.count:,}",
    }
    print_rows(counts, columns, node.output, right=("messages",))


@app.command
def cancel(
    subject: Subject, number: Number, deliver_at: At, /, *, partition: Partition = None, node: NodeOptions = NODE
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

    node.run(work)
    if node.output == "json":
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
    delay: Annotated[str | None, described("This long from now: 10s, 5m, level3.")] = None,
    to: Annotated[str | None, described("At this time, such as 2025-01-31T12:00.")] = None,
    partition: Partition = None,
    node: NodeOptions = NODE,
) -> None:
    """Deliver a message at another time."""
    from plait.client.arguments import to_datetime
    from plait.client.send.encoding import due_of

    if (delay is None) == (to is None):
        raise InvalidArgument("use --delay or --to for the new time: exactly one of them")
    at = time_of(deliver_at)
    now = -(-time.time_ns() // 1000)
    due = to_datetime(due_of(None if delay is None else delay_of(delay), None if to is None else time_of(to), now))
    new = node.run(lambda client: client.admin.reschedule(subject, number, at, to=due, partition=partition))
    fields = {"subject": subject, "number": new, "deliver_at": due}
    facts = [("subject", subject), ("number", str(new)), ("deliver at", format_time_exactly(due))]
    print_result(node.output, fields, facts)


def _fields(message: ScheduledMessage) -> dict[str, Any]:
    shown = {"partition": str(message.partition), "message_id": str(message.message_id)}
    return msgspec.structs.asdict(message) | shown
