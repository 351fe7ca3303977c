"""``plait group``: shows the progress of groups, changes, rewinds and deletes them, and handles their parked keys."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter
from msgspec import to_builtins
from msgspec.structs import asdict, replace

from plait.cli.commands.rewind import rewind
from plait.cli.options import (
    NODE,
    NodeOptions,
    Partition,
    Yes,
    confirm,
    described,
    duration_of,
    rate_of,
    signed,
    whole_of,
)
from plait.cli.output import (
    format_micros,
    format_time,
    print_facts,
    print_json,
    print_result,
    print_rows,
    print_table,
    reason_fields,
    shortened,
)
from plait.errors import InvalidArgument, KeyNotParked
from plait.limits import LOGICAL_PARTITIONS
from plait.model.names import counted

if TYPE_CHECKING:
    from plait.client.admin.admin import AllocationInfo
    from plait.client.admin.parked_key_admin import ParkedKey
    from plait.client.client import Client
    from plait.wire.admin.subjects import GroupInfo

app = App(name="group", help="List, describe, change, rewind and delete consumer groups; their parked keys.")

Subject = Annotated[str, described("The subject the group consumes.")]
Group = Annotated[str, described("The group's name.")]
Key = Annotated[str | None, signed("The order key.")]
Hash = Annotated[
    str | None, Parameter(name="--hash", help="The key's hash, as 'plait group parked' shows it, instead of the key.")
]
All = Annotated[bool, Parameter(name="--all", help="Every parked key of the group.", show_default=False)]


@app.command(name="list")
def list_groups(
    subject: Annotated[str | None, described("Only the groups of this subject.")] = None,
    /,
    *,
    partition: Partition = None,
    node: NodeOptions = NODE,
) -> None:
    """List the groups of a subject, or of all."""
    groups = node.run(lambda client: client.admin.groups(subject, partition=partition))
    print_groups(groups, node.output)


@app.command
def describe(subject: Subject, group: Group, /, *, partition: Partition = None, node: NodeOptions = NODE) -> None:
    """Describe a group and its consumers, over all partitions or in one."""

    async def work(client: Client) -> tuple[GroupInfo, AllocationInfo | None]:
        info = await client.admin.group(subject, group, partition=partition)
        return info, await client.admin.allocation(subject, group) if info.ordered or info.affinity else None

    found, allocation = node.run(work)
    if node.output == "json":
        print_json({**to_builtins(found), "allocation": allocation} if allocation is not None else found)
        return
    print_facts(
        [
            ("subject", found.subject),
            ("group", found.group),
            ("kind", kind_of(found)),
            *(
                []
                if found.paused is None
                else [("paused", f"since {format_micros(found.paused)} (plait group resume)")]
            ),
            *_rate_facts(found),
            ("delivery", found.delivery.replace("_", " ")),
            ("retry", f"failed messages wait {found.retry}"),
            *_filter_facts(found),
            ("lag", f"{_about(found.estimated)}{found.lag:,} not done yet"),
            ("next", f"{found.next} is delivered next; everything before {found.floor} is done"),
            ("unacked", f"{_about(found.estimated)}{found.unacked:,} held by consumers"),
            ("returned", f"{_about(found.estimated)}{found.returned:,} to be delivered again"),
            ("waiting", f"{found.waiting:,} failed and wait for their next attempt"),
            ("dead", f"{found.dead:,} dead letters (plait dlq)"),
            ("redelivered", f"{found.redelivered:,} in total"),
            *([("filtered", f"{found.filtered:,} left out by the filter")] if found.filter or found.filtered else []),
            (
                "lost",
                f"{_about(found.lost_estimated)}{found.lost:,} removed by retention or damage before they were done",
            ),
            *(
                [
                    ("holding", f"{found.holding:,} keys are held back by a failed message"),
                    ("parked", f"{found.parked:,} of them are parked (plait group parked)"),
                ]
                if found.ordered
                else []
            ),
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


def _print_shares(group: GroupInfo, allocation: AllocationInfo) -> None:
    """Print the share of each member, and the locks and rows that it has."""
    consumers = {consumer.client: consumer for consumer in group.consumers}
    shares = {member.client: member.count for member in allocation.members}
    columns: dict[str, Callable[[str], str]] = {
        "consumer": str,
        "online": lambda name: "yes" if name in consumers and consumers[name].online else "no",
        "share": lambda name: f"{shares.get(name, 0)} of {LOGICAL_PARTITIONS}",
        "locks": lambda name: str(consumers[name].locks) if name in consumers else "0",
        "unacked": lambda name: f"{consumers[name].held:,}" if name in consumers else "0",
    }
    print_rows(sorted(consumers.keys() | shares.keys()), columns, right=("share", "locks", "unacked"))


app.command(rewind)


@app.command(name="set")
def set_(
    subject: Subject,
    group: Group,
    /,
    *,
    attempts: Annotated[str | None, described("Attempts before a message is a dead letter, or 'unlimited'.")] = None,
    first: Annotated[str | None, described("The wait before the second attempt, as in 1s.")] = None,
    factor: Annotated[float | None, described("The factor from each wait to the next.")] = None,
    longest: Annotated[str | None, described("The longest wait, as in 10m.")] = None,
    steps: Annotated[str | None, described("The waits themselves, as in 1s,10s,1m; the last repeats.")] = None,
    expires: Annotated[
        str | None, described("A message that fails this long after it was sent is dead, as in 1d.")
    ] = None,
    where: Annotated[str | None, described("Deliver only messages that match, as in \"city = 'BJS'\".")] = None,
    tag: Annotated[list[str] | None, described("Only messages with this tag; give it again for another one.")] = None,
    no_filter: Annotated[bool, described("Deliver all messages.")] = False,
    rate: Annotated[
        str | None, described("Messages and bytes that it gets in a second at most, as in 500, 10MiB, both, or none.")
    ] = None,
    fair_by: Annotated[str | None, described("What identifies a tenant: 'key' or a header; '' for none.")] = None,
    node: NodeOptions = NODE,
) -> None:
    """Change the retry policy or the fairness of a group without connected consumers, or its filter or rate.

    Omitted retry values stay unchanged. --where and --tag together replace the filter.
    """
    limit = None if rate is None else rate_of(rate, "--rate")
    changed: dict[str, Any] = {} if factor is None else {"factor": factor}
    if attempts is not None:
        changed["attempts"] = None if attempts == "unlimited" else whole_of(attempts, "--attempts")
    for name, value in (("first", first), ("longest", longest), ("expires", expires)):
        if value is not None:
            changed[name] = duration_of(value)
    if steps is not None:
        changed["steps"] = tuple(duration_of(step.strip()) for step in steps.split(",") if step.strip())
    filtered = where is not None or bool(tag)
    if filtered and no_filter:
        raise InvalidArgument("--no-filter removes the filter; leave --where and --tag out")
    if not (changed or filtered or no_filter or fair_by is not None or limit is not None):
        raise InvalidArgument(
            "nothing to change; use --attempts, --first, --factor, --longest, --steps, --expires, --where, --tag, "
            "--no-filter, --fair-by or --rate"
        )

    async def work(client: Client) -> GroupInfo:
        admin = client.admin
        found = await admin.group(subject, group)
        if changed:
            found = await admin.set_group(subject, group, retry=replace(found.retry, **changed))
        if fair_by is not None:
            found = await admin.set_group(subject, group, fair_by=fair_by or None)
        if filtered or no_filter:
            found = await admin.set_group_filter(subject, group, where=where, tags=tag)
        if limit is not None:
            await admin.set_group_rate(subject, group, **asdict(limit))
            found = await admin.group(subject, group)
        return found

    _print_settings(node, node.run(work))


def _print_settings(node: NodeOptions, found: GroupInfo) -> None:
    facts = [("subject", found.subject), ("group", found.group), ("retry", f"failed messages wait {found.retry}")]
    print_result(node.output, found, [*facts, *_filter_facts(found), *_rate_facts(found)])


def _rate_facts(group: GroupInfo) -> list[tuple[str, str]]:
    return [] if group.rate is None else [("rate", f"{group.rate} at most")]


def _filter_facts(group: GroupInfo) -> list[tuple[str, str]]:
    filtered = [] if group.filter is None else [("filter", str(group.filter))]
    return filtered if group.fair_by is None else [*filtered, ("fair by", group.fair_by)]


@app.command
def delete(subject: Subject, group: Group, /, *, yes: Yes = False, node: NodeOptions = NODE) -> None:
    """Delete a group without connected consumers, with its position and its dead letters, permanently."""
    confirm(group, f"group {group!r} of {subject!r} with its position and dead letters", yes=yes)
    node.run(lambda client: client.admin.delete_group(subject, group))
    if node.output == "json":
        print_json({"subject": subject, "group": group, "deleted": True})
    else:
        sys.stderr.write(f"deleted {group} of {subject}\n")


def kind_of(group: GroupInfo) -> str:
    if group.affinity:
        return f"affinity {group.affinity}"
    return "broadcast" if group.broadcast else "ordered" if group.ordered else "shared"


def print_groups(groups: Sequence[GroupInfo], output: str = "table") -> None:
    columns: dict[str, Callable[[GroupInfo], str]] = {
        "subject": lambda g: g.subject,
        "group": lambda g: g.group,
        "kind": lambda g: kind_of(g) + ("" if g.paused is None else ", paused"),
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


@app.command
def pause(subject: Subject, group: Group, /, *, node: NodeOptions = NODE) -> None:
    """Give no more messages to the consumers of a group until 'plait group resume'; they stay attached."""
    since = node.run(lambda client: client.admin.pause_group(subject, group))
    facts = [("subject", subject), ("group", group), ("paused", f"since {format_time(since)}")]
    print_result(node.output, {"subject": subject, "group": group, "paused": since}, facts)


# --- parked keys ----------------------------------------------------------------------------------


@app.command
def parked(subject: Subject, group: Group, /, *, partition: Partition = None, node: NodeOptions = NODE) -> None:
    """List the parked keys, oldest first."""
    columns: dict[str, Callable[[ParkedKey], str]] = {
        "key": lambda key: "-" if key.key is None else key.key,
        "since": lambda key: "-" if key.since is None else format_time(key.since),
        "attempts": lambda key: str(key.attempts),
        "reason": lambda key: shortened(str(key.reason)),
        "letter": lambda key: "-" if key.sequence is None else str(key.sequence),
        "partition": lambda key: str(key.partition),
        "lp": lambda key: str(key.lp),
        "hash": lambda key: f"{key.hash:016x}",
    }

    def fields(key: ParkedKey) -> dict[str, Any]:
        # The hash is text, as ``--hash`` takes it: many JSON readers have no 64-bit integers.
        shown = {name: columns[name](key) for name in ("hash", "partition")}
        return asdict(key) | shown | {"reason": reason_fields(key.reason)}

    keys = node.run(lambda client: client.admin.parked(subject, group, partition=partition))
    print_rows(keys, columns, node.output, right=("attempts", "letter", "lp"), fields=fields)


@app.command
def resume(
    subject: Subject,
    group: Group,
    key: Key = None,
    /,
    *,
    by_hash: Hash = None,
    everything: All = False,
    node: NodeOptions = NODE,
) -> None:
    """Resume a paused group; with a key, or --all: resume parked keys, each with its failed message."""
    if key is None and by_hash is None and not everything:
        since = node.run(lambda client: client.admin.resume_group(subject, group))
        if since is None:
            raise InvalidArgument(
                f"group {group!r} of {subject!r} is not paused; to resume parked keys, name one key, or its --hash, "
                "or use --all"
            )
        facts = [("subject", subject), ("group", group), ("paused", "no longer")]
        print_result(node.output, {"subject": subject, "group": group, "paused": None}, facts)
        return
    _unpark("resume", subject, group, _which(key, by_hash, everything=everything), node)


@app.command
def skip(
    subject: Subject,
    group: Group,
    key: Key = None,
    /,
    *,
    by_hash: Hash = None,
    everything: All = False,
    node: NodeOptions = NODE,
) -> None:
    """Skip the failed message of each parked key, which stays a dead letter; continue with its later messages."""
    _unpark("skip", subject, group, _which(key, by_hash, everything=everything), node)


def _which(key: str | None, by_hash: str | None, *, everything: bool) -> str | int | None:
    """A key, the hash of one, or None for all parked keys."""
    if (key is not None) + (by_hash is not None) + everything != 1:
        raise InvalidArgument("name one key, or its --hash, or use --all")
    if by_hash is None:
        return key
    try:
        return int(by_hash, 16)
    except ValueError:
        raise InvalidArgument(f"--hash {by_hash!r} is not hexadecimal; copy it from 'plait group parked'") from None


def _unpark(
    what: Literal["resume", "skip"], subject: str, group: str, which: str | int | None, node: NodeOptions
) -> None:
    """Run ``resume`` or ``skip``, and print the number of keys."""

    async def work(client: Client) -> int:
        admin = client.admin
        if which is None:
            return await (admin.skip_all if what == "skip" else admin.resume_all)(subject, group)
        key: Any = which
        if isinstance(which, int):
            found = [each for each in await admin.parked(subject, group) if each.hash == which]
            if not found:
                raise KeyNotParked(
                    f"no key with hash {which:016x} is parked in group {group!r} on {subject!r}",
                    subject=subject,
                    group=group,
                )
            key = found[0]
        await (admin.skip_key if what == "skip" else admin.resume_key)(subject, group, key)
        return 1

    count = node.run(work)
    done = "skipped" if what == "skip" else "resumed"
    facts = [("subject", subject), ("group", group), (done, counted(count, "key"))]
    print_result(node.output, {"subject": subject, "group": group, done: count}, facts)
