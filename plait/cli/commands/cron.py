"""``plait cron``: creates, lists, changes, pauses and removes recurrences."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import App

from plait.cli.commands.send import headers_of
from plait.cli.options import NODE, NodeOptions, described, duration_of
from plait.cli.output import format_time_exactly, print_json, print_result, print_rows, shortened
from plait.errors import InvalidArgument

if TYPE_CHECKING:
    from plait.client.admin.recurrence_admin import Recurrence

app = App(name="cron", help="Recurring messages: create, list, change, pause and remove them.")

Name = Annotated[str, described("The name of the recurrence.")]
Cron = Annotated[str | None, described("When: five cron fields, as in '30 2 * * MON-FRI'.")]
Zone = Annotated[str | None, described("The time zone of --cron, as in Europe/Berlin; default UTC.")]
Every = Annotated[str | None, described("When: an interval, as in 30s or 1h; instead of --cron.")]
CatchUp = Annotated[
    Literal["one", "all", "none"] | None, described("After missed firings: send one for all (default), all, or none.")
]
Key = Annotated[str | None, described("The order key of the messages.")]
Tags = Annotated[list[str] | None, described("A tag; may be repeated.")]
Headers = Annotated[
    list[str] | None, described("name=text, or name:=value for a number, true or false; may be repeated.")
]


@app.command
def create(
    name: Name,
    subject: Annotated[str, described("The subject to send to.")],
    body: Annotated[str, described("The message.")] = "",
    /,
    *,
    cron: Cron = None,
    zone: Zone = None,
    every: Every = None,
    catch_up: CatchUp = None,
    key: Key = None,
    tag: Tags = None,
    header: Headers = None,
    node: NodeOptions = NODE,
) -> None:
    """Create a recurrence: a message that is sent again and again."""
    made = node.run(
        lambda client: client.admin.create_recurrence(
            name,
            subject,
            body.encode("utf-8", "surrogateescape"),
            cron=cron,
            zone=zone or "UTC",
            every=None if every is None else duration_of(every),
            catch_up=catch_up or "one",
            key=key,
            tags=tag,
            headers=headers_of(header),
        )
    )
    _print(made, node.output)


@app.command(name="list")
def list_recurrences(
    subject: Annotated[str | None, described("Only the recurrences of this subject.")] = None,
    /,
    *,
    node: NodeOptions = NODE,
) -> None:
    """List recurrences with their next firing."""
    found = node.run(lambda client: client.admin.recurrences(subject))
    columns: dict[str, Callable[[Recurrence], str]] = {
        "name": lambda each: each.name,
        "subject": lambda each: each.subject,
        "rule": _rule,
        "next": lambda each: "paused" if each.paused else _time(each.next),
        "firings": lambda each: f"{each.firings:,}",
        "last": lambda each: _time(each.last),
    }
    print_rows(found, columns, node.output, right=("firings",), fields=_fields)


@app.command
def show(name: Name, /, *, node: NodeOptions = NODE) -> None:
    """Show a recurrence with its message."""
    _print(node.run(lambda client: client.admin.recurrence(name)), node.output)


@app.command(name="set")
def set_recurrence(
    name: Name,
    /,
    *,
    body: Annotated[str | None, described("The new message.")] = None,
    cron: Cron = None,
    zone: Zone = None,
    every: Every = None,
    catch_up: CatchUp = None,
    key: Key = None,
    tag: Tags = None,
    header: Headers = None,
    node: NodeOptions = NODE,
) -> None:
    """Change a recurrence. A new rule counts from now."""
    given: dict[str, Any] = {
        "body": None if body is None else body.encode("utf-8", "surrogateescape"),
        "cron": cron,
        "zone": zone,
        "every": None if every is None else duration_of(every),
        "catch_up": catch_up,
        "key": key,
        "tags": tag,
        "headers": headers_of(header),
    }
    changed = {field: value for field, value in given.items() if value is not None}
    if not changed:
        raise InvalidArgument(f"nothing of recurrence {name!r} to change; give --body, --cron or another option")
    _print(node.run(lambda client: client.admin.set_recurrence(name, **changed)), node.output)


@app.command
def pause(name: Name, /, *, node: NodeOptions = NODE) -> None:
    """Pause a recurrence: it does not fire until it is resumed."""
    _print(node.run(lambda client: client.admin.pause_recurrence(name)), node.output)


@app.command
def resume(name: Name, /, *, node: NodeOptions = NODE) -> None:
    """Resume a recurrence. The times that passed meanwhile are not made up for."""
    _print(node.run(lambda client: client.admin.resume_recurrence(name)), node.output)


@app.command
def remove(name: Name, /, *, node: NodeOptions = NODE) -> None:
    """Remove a recurrence."""
    node.run(lambda client: client.admin.remove_recurrence(name))
    if node.output == "json":
        print_json({"name": name, "removed": True})
    else:
        sys.stderr.write(f"removed {name}\n")


@app.command(name="next")
def next_times(
    name: Annotated[str | None, described("The name of a recurrence; omitted: the rule of the options.")] = None,
    /,
    *,
    cron: Cron = None,
    zone: Zone = None,
    every: Every = None,
    count: Annotated[int, described("How many times.")] = 10,
    node: NodeOptions = NODE,
) -> None:
    """Print the next times of a recurrence, or of a rule that you want to try."""
    seconds = None if every is None else duration_of(every)
    times = node.run(
        lambda client: client.admin.firing_times(name, cron=cron, zone=zone or "UTC", every=seconds, count=count)
    )
    print_rows(times, {"due": format_time_exactly}, node.output)


def _rule(each: Recurrence) -> str:
    return f"every {each.every:g} s" if each.every is not None else f"{each.cron} {each.zone}"


def _time(moment: datetime | None) -> str:
    return "-" if moment is None else format_time_exactly(moment)


def _fields(each: Recurrence) -> dict[str, Any]:
    return msgspec.structs.asdict(each) | {"body": each.body.decode("utf-8", "replace")}


def _print(each: Recurrence, output: str) -> None:
    facts = [
        ("name", each.name),
        ("subject", each.subject),
        ("rule", _rule(each)),
        ("catch up", each.catch_up),
        ("next", "paused" if each.paused else _time(each.next)),
        ("firings", f"{each.firings:,}"),
        ("last", _time(each.last)),
        ("key", each.key or "-"),
        ("tags", ", ".join(each.tags) or "-"),
        ("headers", ", ".join(f"{name}={value}" for name, value in each.headers.items()) or "-"),
        ("body", shortened(each.body.decode("utf-8", "replace"))),
    ]
    print_result(output, _fields(each), facts)
