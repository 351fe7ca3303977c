"""``plait subject``: lists, creates, changes and deletes subjects, and moves them to other partitions."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import App
from msgspec.structs import asdict

from plait.cli.options import NODE, NodeOptions, Yes, confirm, described, duration_of, flag, rate_of, size_of
from plait.cli.output import (
    format_duration,
    format_micros,
    format_size,
    print_facts,
    print_json,
    print_result,
    print_rows,
    print_table,
)
from plait.errors import InvalidArgument, Timeout
from plait.limits import LOGICAL_PARTITIONS

if TYPE_CHECKING:
    from plait.client.admin.admin import RouteInfo
    from plait.client.client import Client
    from plait.wire.admin.subjects import SubjectInfo

app = App(name="subject", help="List, describe, create, change, expand and delete subjects.")

#: The interval at which ``expand --wait`` asks for the route.
LOOK_SECONDS = 0.25

Name = Annotated[str, described("The subject's name.")]


#: Columns of a partition.
_COUNTS: Final[dict[str, Callable[[SubjectInfo], str]]] = {
    "partition": lambda s: s.partition,
    "messages": lambda s: f"{s.count:,}",
    "size": lambda s: format_size(s.size),
    "first": lambda s: str(s.start),
    "end": lambda s: str(s.end),
    "groups": lambda s: str(s.groups),
}


@app.command(name="list")
def list_subjects(*, node: NodeOptions = NODE) -> None:
    """List all subjects, one line per partition."""
    subjects = node.run(lambda client: client.admin.subjects())
    columns = {
        "subject": lambda s: s.subject,
        **_COUNTS,
        "kept for": lambda s: format_duration(s.retention_seconds),
        "created": lambda s: format_micros(s.created),
    }
    print_rows(subjects, columns, node.output, right=tuple(_COUNTS)[1:])


@app.command
def describe(subject: Name, /, *, node: NodeOptions = NODE) -> None:
    """Describe a subject, its partitions and its groups."""
    details = node.run(lambda client: client.admin.subject(subject))
    if node.output == "json":
        print_json(details)
        return
    _print_subject(details.subject)
    if len(details.partitions) > 1:
        print_rows(details.partitions, _COUNTS, right=tuple(_COUNTS)[1:])
    if details.groups:
        from plait.cli.commands.group import print_groups

        print_groups(details.groups)


@app.command
def create(
    subject: Name,
    /,
    *,
    retention: Annotated[str | None, described("How long messages are kept, as in 7d; default: the server's.")] = None,
    retention_size: Annotated[
        str | None, described("How much of the newest messages is kept at least, as in 10GiB.")
    ] = None,
    order: Annotated[
        Literal["best_tried", "strict"],
        described("Whether later messages of a key pass a failed one (best_tried) or wait for it (strict)."),
    ] = "best_tried",
    partitions: Annotated[
        int | None,
        described("How many partitions; default: one on each of two broker groups, or of --group."),
    ] = None,
    group: Annotated[
        list[str] | None, described("A broker group for the partitions; may be repeated. Default: any.")
    ] = None,
    node: NodeOptions = NODE,
) -> None:
    """Create a subject; it is an error if it exists."""
    size = None if retention_size is None else size_of(retention_size)
    seconds = None if retention is None else duration_of(retention)
    created = node.run(
        lambda client: client.admin.create_subject(
            subject, retention=seconds, retention_bytes=size, order=order, partitions=partitions, groups=group
        ),
    )
    _print_subject(created, node.output)


@app.command(name="set")
def set_(
    subject: Name,
    /,
    *,
    retention: Annotated[
        str | None, described("How long messages are kept, as in 7d, or default: as the server keeps them.")
    ] = None,
    retention_size: Annotated[
        str | None, described("How much of the newest messages is kept at least, as in 10GiB, or default.")
    ] = None,
    send_rate: Annotated[
        str | None, described("Messages and bytes that are sent in a second at most, as in 500, 10MiB, both, or none.")
    ] = None,
    node: NodeOptions = NODE,
) -> None:
    """Change the retention or the send rate of a subject; omitted values stay unchanged."""
    rate = None if send_rate is None else rate_of(send_rate, "--send-rate")
    if retention is None and retention_size is None and rate is None:
        raise InvalidArgument(f"nothing to change in {subject!r}; use --retention, --retention-size or --send-rate")
    changes: dict[str, Any] = {}
    if retention is not None:
        changes["retention"] = "default" if retention == "default" else duration_of(retention)
    if retention_size is not None:
        changes["retention_bytes"] = "default" if retention_size == "default" else size_of(retention_size)

    async def work(client: Client) -> SubjectInfo:
        if rate is not None:
            await client.admin.set_send_rate(subject, **asdict(rate))
        if changes:
            return await client.admin.set_subject(subject, **changes)
        return (await client.admin.subject(subject)).subject

    _print_subject(node.run(work), node.output)


@app.command
def expand(
    subject: Name,
    /,
    *,
    partitions: Annotated[
        str,
        described("How many partitions take its messages, more or fewer than now; or which, as name@group,name@group."),
    ],
    wait: Annotated[bool, flag("Wait until every logical partition has moved.")] = False,
    timeout: Annotated[str, described("How long --wait waits.")] = "60s",
    node: NodeOptions = NODE,
) -> None:
    """Change the partitions of a subject; its messages and the order of its keys are kept."""
    wanted = int(partitions) if partitions.lstrip("-").isdecimal() else [name.strip() for name in partitions.split(",")]
    seconds = duration_of(timeout)

    async def work(client: Client) -> RouteInfo:
        route = await client.admin.expand_subject(subject, wanted)
        return await _reached(client, route, seconds) if wait else route

    _print_route(node.run(work), node.output)


async def _reached(client: Client, route: RouteInfo, seconds: float) -> RouteInfo:
    """Wait until every logical partition has moved, show the progress, and return the route."""
    from plait.cli.progress import ProgressSteps

    until = time.monotonic() + seconds
    first = route.moving
    with ProgressSteps() as steps:
        steps.step("moving", first, "logical partitions")
        while not route.reached:
            if time.monotonic() >= until:
                raise Timeout(
                    f"{route.moving} of {LOGICAL_PARTITIONS} logical partitions of {route.subject!r} have not moved "
                    f"within {seconds:g} s (--timeout); they still move: see 'plait subject route {route.subject}'"
                )
            steps.update(max(first - route.moving, 0))
            await asyncio.sleep(LOOK_SECONDS)
            route = await client.admin.route(route.subject)
    return route


@app.command
def route(subject: Name, /, *, node: NodeOptions = NODE) -> None:
    """Show the partitions that take a subject's messages, and those that have older ones."""
    _print_route(node.run(lambda client: client.admin.route(subject)), node.output)


def _print_route(route: RouteInfo, output: str) -> None:
    if output == "json":
        print_json(route)
        return
    still = f"{route.moving} of {LOGICAL_PARTITIONS} logical partitions are still to move"
    print_facts(
        [
            ("subject", route.subject),
            ("order", route.order),
            ("version", str(route.version)),
            ("target", "reached" if route.reached else still),
        ]
    )
    columns = ("partition", "state", "takes", "wanted", "draining")
    rows = ((p.partition, p.state, str(p.takes), str(p.wanted), str(p.draining)) for p in route.partitions)
    print_table(columns, rows, right=columns[2:])


@app.command
def delete(subject: Name, /, *, yes: Yes = False, node: NodeOptions = NODE) -> None:
    """Delete a subject with its messages and groups, permanently."""
    confirm(subject, f"{subject!r} with all its messages and groups", yes=yes)
    node.run(lambda client: client.admin.delete_subject(subject))
    if node.output == "json":
        print_json({"subject": subject, "deleted": True})
    else:
        sys.stderr.write(f"deleted {subject}\n")


def _print_subject(subject: SubjectInfo, output: str = "table") -> None:
    several = "," in subject.partition
    print_result(
        output,
        subject,
        [
            ("subject", subject.subject),
            ("partitions" if several else "partition", subject.partition),
            ("messages", f"{subject.count:,}"),
            ("size", format_size(subject.size)),
            # Each partition has sequences of its own.
            *([] if several else [("sequences", f"{subject.start} up to {subject.end}")]),
            ("kept for", format_duration(subject.retention_seconds)),
            ("kept at least", "-" if subject.retention_bytes is None else format_size(subject.retention_bytes)),
            *([] if subject.send_rate is None else [("send rate", f"{subject.send_rate} at most")]),
            ("groups", str(subject.groups)),
            ("created", format_micros(subject.created)),
        ],
    )
