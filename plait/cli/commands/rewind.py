"""``plait group rewind``: shows what a rewind of a group changes, asks, and rewinds it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import to_builtins

from plait.cli.options import NODE, NodeOptions, Partition, Yes, confirm, described, flag, signed
from plait.cli.output import format_time, print_facts, print_json, print_rows
from plait.errors import InvalidArgument

if TYPE_CHECKING:
    from plait.client.admin.rewind_admin import Rewind
    from plait.client.client import Client
    from plait.wire.admin.rewinds import PartitionRewind

_COLUMNS: dict[str, Callable[[PartitionRewind], str]] = {
    "partition": lambda each: each.partition,
    "next": lambda each: str(each.before),
    "position": lambda each: str(each.position),
    "again": lambda each: f"{each.again:,}",
    "handled": lambda each: f"{each.handled:,}",
    "open": lambda each: f"{each.open:,}",
    "skipped": lambda each: f"{each.skipped:,}",
    "held": lambda each: f"{each.held:,}",
    "waiting": lambda each: f"{each.waiting:,}",
    "dead again": lambda each: f"{each.dead_again:,}",
    "dead left": lambda each: f"{each.dead_left:,}",
    "keys resumed": lambda each: f"{each.resumed:,}",
    "gone": lambda each: f"{each.gone:,}",
}


def rewind(
    subject: Annotated[str, described("The subject the group consumes.")],
    group: Annotated[str, described("The group's name.")],
    /,
    *,
    to: Annotated[
        str | None,
        signed("earliest, latest, -5m (5 minutes ago), a time such as 2025-01-31T12:00, or a sequence."),
    ] = None,
    sequence: Annotated[int | None, described("A sequence of one partition, instead of --to.")] = None,
    partition: Partition = None,
    skip: Annotated[bool, flag("Skip what the group has not handled before the position; latest always does.")] = False,
    preview: Annotated[bool, flag("Only show what would change.")] = False,
    yes: Yes = False,
    node: NodeOptions = NODE,
) -> None:
    """Deliver all messages from a position on again, to a group without connected consumers; or skip to a position."""
    if (to is None) == (sequence is None):
        raise InvalidArgument("name one position: use --to, or --sequence with --partition")
    position: Any = sequence if to is None else to

    async def work(client: Client) -> None:
        found = await client.admin.rewind_group(subject, group, position, skip=skip, preview=True, partition=partition)
        if preview or not yes:
            print_rewind(found, node.output if preview else "table", done=False)
        if preview:
            return
        confirm(group, f"group {group!r} of {subject!r} to {found.to}", yes=yes, verb="rewind")
        # The same moment, if the position is relative to now.
        done = await client.admin.rewind_group(subject, group, found.to, skip=skip, partition=partition)
        print_rewind(done, node.output, done=True)

    node.run(work)


def print_rewind(found: Rewind, output: str, *, done: bool) -> None:
    """Print what a rewind changed (``done``) or would change."""
    if output == "json":
        print_json({**to_builtins(found), "done": done})
        return
    about = "about " if found.estimated else ""
    stored = [] if found.between is None else [("stored", " to ".join(map(format_time, found.between)))]
    most = "at most " if any(each.gone_at_most for each in found.partitions) else ""
    print_facts(
        [
            ("subject", found.subject),
            ("group", found.group),
            ("position", format_time(found.to) if isinstance(found.to, datetime) else str(found.to)),
            ("again", f"{about}{found.again:,} messages come again; {about}{found.handled:,} of them were handled"),
            ("open", f"{about}{found.open:,} messages before the position are not handled and still come"),
            ("skipped", f"{about}{found.skipped:,} messages that are not handled are skipped"),
            *stored,
            *([("gone", f"{most}{found.gone:,} messages were removed by retention")] if found.gone else []),
            *([("left", "messages of partitions that have left the route do not come again")] * found.left_route),
            ("state", "rewound" if done else "nothing is changed yet"),
        ]
    )
    print_rows(found.partitions, _COLUMNS, right=tuple(_COLUMNS)[1:])
