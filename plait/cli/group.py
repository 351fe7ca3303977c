"""``plait group``: how far each group is, and moving it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from plait.cli.loop import with_client
from plait.cli.options import DEFAULT_SERVER, Output, Partition, Server
from plait.cli.output import print_facts, print_json, print_table

if TYPE_CHECKING:
    from plait.client.admin import GroupInfo

app = App(name="group", help="List, describe and reset consumer groups.")

Subject = Annotated[str, Parameter(help="The subject the group consumes.")]
Group = Annotated[str, Parameter(help="The group's name.")]


@app.command(name="list")
def list_groups(
    subject: Annotated[str | None, Parameter(help="Only the groups of this subject.")] = None,
    /,
    *,
    partition: Partition = None,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """List the groups of a subject, or of all."""
    groups = with_client(server, lambda client: client.admin.groups(subject, partition=partition))
    if output == "json":
        print_json(groups)
    else:
        print_groups(groups)


@app.command
def describe(
    subject: Subject,
    group: Group,
    /,
    *,
    partition: Partition = None,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """Describe a group and its consumers; over several partitions, or in one of them."""
    found = with_client(server, lambda client: client.admin.group(subject, group, partition=partition))
    if output == "json":
        print_json(found)
        return
    print_facts(
        [
            ("subject", found.subject),
            ("group", found.group),
            ("kind", "broadcast" if found.broadcast else "shared"),
            ("delivery", found.delivery.replace("_", " ")),
            ("retry", f"failed messages wait {found.retry}"),
            ("lag", f"{found.lag:,} not done yet"),
            ("next", f"{found.next} is handed out next; everything before {found.floor} is done"),
            ("unacked", f"{found.unacked:,} in consumers' hands"),
            ("returned", f"{found.returned:,} to be handed out again"),
            ("waiting", f"{found.waiting:,} failed and wait for their next attempt"),
            ("dead", f"{found.dead:,} failed for good (plait dlq)"),
            ("redelivered", f"{found.redelivered:,} so far"),
            ("lost", f"{found.lost:,} taken by retention or damage before they were done"),
        ]
    )
    if found.consumers:
        rows = ((c.client, "yes" if c.online else "no", f"{c.held:,}") for c in found.consumers)
        print_table(("consumer", "online", "unacked"), rows, right=("unacked",))


@app.command
def reset(
    subject: Subject,
    group: Group,
    /,
    *,
    to: Annotated[
        str,
        Parameter(
            allow_leading_hyphen=True,
            help="earliest, latest, a sequence, -5m before now, or a time such as 2025-01-31T12:00.",
        ),
    ],
    partition: Partition = None,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """Move a group that has no live consumers."""
    sequence = with_client(server, lambda client: client.admin.reset_group(subject, group, to, partition=partition))
    if output == "json":
        print_json({"subject": subject, "group": group, "next": sequence})
    else:
        print_facts([("subject", subject), ("group", group), ("next", str(sequence))])


def print_groups(groups: Iterable[GroupInfo]) -> None:
    """A line a group."""
    columns = (
        "subject",
        "group",
        "kind",
        "lag",
        "unacked",
        "returned",
        "waiting",
        "dead",
        "redelivered",
        "lost",
        "online",
    )
    rows = (
        (
            g.subject,
            g.group,
            "broadcast" if g.broadcast else "shared",
            f"{g.lag:,}",
            f"{g.unacked:,}",
            f"{g.returned:,}",
            f"{g.waiting:,}",
            f"{g.dead:,}",
            f"{g.redelivered:,}",
            f"{g.lost:,}",
            str(g.online),
        )
        for g in groups
    )
    print_table(columns, rows, right=columns[3:])
