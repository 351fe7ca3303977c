"""``plait group``: shows the progress of groups, changes, resets and deletes them, and handles their parked keys."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from msgspec import to_builtins
from msgspec.structs import replace

from plait.cli.event_loop import with_client
from plait.cli.options import DEFAULT_SERVER, Output, Partition, Server, Yes, confirm, duration_of, whole_of
from plait.cli.output import print_facts, print_json, print_result, print_rows, print_table
from plait.errors import InvalidArgument
from plait.limits import LOGICAL_PARTITIONS

if TYPE_CHECKING:
    from plait.client.admin.cluster_admin import AllocationInfo
    from plait.client.client import Client
    from plait.wire.admin.subjects import GroupInfo

app = App(name="group", help="List, describe, change, reset and delete consumer groups; their parked keys.")
app.command("plait.cli.commands.parked:parked", name="parked", help="List the parked keys.")
app.command("plait.cli.commands.parked:resume", name="resume", help="Resume parked keys and retry the failed messages.")
app.command("plait.cli.commands.parked:skip", name="skip", help="Resume parked keys after the failed messages.")

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
    print_groups(groups, output)


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
    """Describe a group and its consumers, over all partitions or in one."""

    async def work(client: Client) -> tuple[GroupInfo, AllocationInfo | None]:
        info = await client.admin.group(subject, group, partition=partition)
        return info, await client.admin.allocation(subject, group) if info.ordered or info.affinity else None

    found, allocation = with_client(server, work)
    if output == "json":
        print_json({**to_builtins(found), "allocation": allocation} if allocation is not None else found)
        return
    print_facts(
        [
            ("subject", found.subject),
            ("group", found.group),
            ("kind", kind_of(found)),
            ("delivery", found.delivery.replace("_", " ")),
            ("retry", f"failed messages wait {found.retry}"),
            ("lag", f"{_about(found.estimated)}{found.lag:,} not done yet"),
            ("next", f"{found.next} is delivered next; everything before {found.floor} is done"),
            ("unacked", f"{_about(found.estimated)}{found.unacked:,} held by consumers"),
            ("returned", f"{_about(found.estimated)}{found.returned:,} to be delivered again"),
            ("waiting", f"{found.waiting:,} failed and wait for their next attempt"),
            ("dead", f"{found.dead:,} dead letters (plait dlq)"),
            ("redelivered", f"{found.redelivered:,} in total"),
            (
                "lost",
                f"{_about(found.lost_estimated)}{found.lost:,} removed by retention or damage before they were done",
            ),
            *_facts_of_keys(found),
        ]
    )
    if allocation is not None:
        _print_shares(found, allocation)
    elif found.consumers:
        rows = ((c.client, "yes" if c.online else "no", f"{c.held:,}") for c in found.consumers)
        print_table(("consumer", "online", "unacked"), rows, right=("unacked",))


def _about(estimated: bool) -> str:
    """The prefix of a number that is estimated."""
    return "about " if estimated else ""


def _facts_of_keys(group: GroupInfo) -> list[tuple[str, str]]:
    if not group.ordered:
        return []
    return [
        ("holding", f"{group.holding:,} keys are held back by a failed message"),
        ("parked", f"{group.parked:,} of them are parked (plait group parked)"),
    ]


def _print_shares(group: GroupInfo, allocation: AllocationInfo) -> None:
    """Print the share of each member, and the locks and rows that it has."""
    consumers = {consumer.client: consumer for consumer in group.consumers}
    shares = {member.client: member.count for member in allocation.members}
    rows = []
    for client in sorted(consumers.keys() | shares.keys()):
        known = consumers.get(client)
        rows.append(
            (
                client,
                "yes" if known is not None and known.online else "no",
                f"{shares.get(client, 0)} of {LOGICAL_PARTITIONS}",
                "0" if known is None else str(known.locks),
                "0" if known is None else f"{known.held:,}",
            )
        )
    columns = ("consumer", "online", "share", "locks", "unacked")
    print_table(columns, rows, right=columns[2:])


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
    """Move the position of a group that has no live consumers."""
    sequence = with_client(server, lambda client: client.admin.reset_group(subject, group, to, partition=partition))
    fields = {"subject": subject, "group": group, "next": sequence}
    print_result(output, fields, [("subject", subject), ("group", group), ("next", str(sequence))])


@app.command(name="set")
def set_(
    subject: Subject,
    group: Group,
    /,
    *,
    attempts: Annotated[
        str | None, Parameter(help="Attempts before a message is a dead letter, or 'unlimited'.")
    ] = None,
    first: Annotated[str | None, Parameter(help="The wait before the second attempt, as in 1s.")] = None,
    factor: Annotated[float | None, Parameter(help="Each wait is the one before times this.")] = None,
    longest: Annotated[str | None, Parameter(help="The longest wait, as in 10m.")] = None,
    steps: Annotated[str | None, Parameter(help="The waits themselves, as in 1s,10s,1m; the last repeats.")] = None,
    expires: Annotated[
        str | None, Parameter(help="A message that fails this long after it was sent is dead, as in 1d.")
    ] = None,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """Change the retry policy of a group without live consumers; omitted values stay unchanged."""
    changed: dict[str, Any] = {}
    if attempts is not None:
        changed["attempts"] = None if attempts == "unlimited" else whole_of(attempts, "--attempts")
    if factor is not None:
        changed["factor"] = factor
    for name, value in (("first", first), ("longest", longest), ("expires", expires)):
        if value is not None:
            changed[name] = duration_of(value)
    if steps is not None:
        changed["steps"] = tuple(duration_of(step.strip()) for step in steps.split(",") if step.strip())
    if not changed:
        raise InvalidArgument("nothing to change; use --attempts, --first, --factor, --longest, --steps or --expires")

    async def work(client: Client) -> GroupInfo:
        before = await client.admin.group(subject, group)
        return await client.admin.set_group(subject, group, retry=replace(before.retry, **changed))

    found = with_client(server, work)
    facts = [("subject", subject), ("group", group), ("retry", f"failed messages wait {found.retry}")]
    print_result(output, found, facts)


@app.command
def delete(subject: Subject, group: Group, /, *, yes: Yes = False, server: Server = DEFAULT_SERVER) -> None:
    """Delete a group without live consumers, with its position and its dead letters, permanently."""
    confirm(group, f"group {group!r} of {subject!r} with its position and dead letters", yes=yes)
    with_client(server, lambda client: client.admin.delete_group(subject, group))
    sys.stderr.write(f"deleted {group} of {subject}\n")


def kind_of(group: GroupInfo) -> str:
    """How the group distributes messages."""
    if group.affinity:
        return f"affinity {group.affinity}"
    return "broadcast" if group.broadcast else "ordered" if group.ordered else "shared"


def print_groups(groups: Sequence[GroupInfo], output: str = "table") -> None:
    """Print one line per group."""
    columns: dict[str, Callable[[GroupInfo], str]] = {
        "subject": lambda g: g.subject,
        "group": lambda g: g.group,
        "kind": kind_of,
        "lag": lambda g: f"{_about(g.estimated)}{g.lag:,}",
        "unacked": lambda g: f"{g.unacked:,}",
        "returned": lambda g: f"{g.returned:,}",
        "waiting": lambda g: f"{g.waiting:,}",
        "dead": lambda g: f"{g.dead:,}",
        "parked": lambda g: f"{g.parked:,}",
        "redelivered": lambda g: f"{g.redelivered:,}",
        "lost": lambda g: f"{_about(g.lost_estimated)}{g.lost:,}",
        "online": lambda g: str(g.online),
    }
    print_rows(groups, columns, output, right=tuple(columns)[3:])
