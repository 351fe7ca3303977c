"""``plait subject``: what there is, and what is kept of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from plait.cli.loop import with_client
from plait.cli.options import DEFAULT_SERVER, Output, Server, Yes, duration_of, size_of
from plait.cli.output import (
    print_facts,
    print_json,
    print_table,
    words_of_seconds,
    words_of_size,
    words_of_time,
)
from plait.errors import InvalidArgument

if TYPE_CHECKING:
    from plait.client.admin import SubjectInfo

app = App(name="subject", help="List, describe, create and delete subjects.")

Name = Annotated[str, Parameter(help="The subject's name.")]


@app.command(name="list")
def list_subjects(*, server: Server = DEFAULT_SERVER, output: Output = "table") -> None:
    """List all subjects, a line for each partition."""
    subjects = with_client(server, lambda client: client.admin.subjects())
    if output == "json":
        print_json(subjects)
        return
    columns = ("subject", "partition", "messages", "size", "first", "end", "groups", "kept for", "created")
    rows = (
        (
            s.subject,
            s.partition,
            f"{s.count:,}",
            words_of_size(s.size),
            str(s.start),
            str(s.end),
            str(s.groups),
            words_of_seconds(s.retention_seconds),
            words_of_time(s.created),
        )
        for s in subjects
    )
    print_table(columns, rows, right=columns[2:7])


@app.command
def describe(subject: Name, /, *, server: Server = DEFAULT_SERVER, output: Output = "table") -> None:
    """Describe a subject, its partitions and its groups."""
    details = with_client(server, lambda client: client.admin.subject(subject))
    if output == "json":
        print_json(details)
        return
    _print_subject(details.subject)
    if len(details.partitions) > 1:
        columns = ("partition", "messages", "size", "first", "end", "groups")
        rows = (
            (p.partition, f"{p.count:,}", words_of_size(p.size), str(p.start), str(p.end), str(p.groups))
            for p in details.partitions
        )
        print_table(columns, rows, right=columns[1:])
    if details.groups:
        from plait.cli.group import print_groups

        print_groups(details.groups)


@app.command
def create(
    subject: Name,
    /,
    *,
    retention: Annotated[
        str | None, Parameter(help="How long messages are kept, as in 7d; the server's default otherwise.")
    ] = None,
    retention_size: Annotated[
        str | None, Parameter(help="How much of the newest is kept at least, as in 10GiB.")
    ] = None,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """Create a subject; an existing one is an error."""
    size = None if retention_size is None else size_of(retention_size)
    seconds = None if retention is None else duration_of(retention)
    created = with_client(
        server, lambda client: client.admin.create_subject(subject, retention=seconds, retention_bytes=size)
    )
    if output == "json":
        print_json(created)
    else:
        _print_subject(created)


@app.command
def delete(subject: Name, /, *, yes: Yes = False, server: Server = DEFAULT_SERVER) -> None:
    """Delete a subject with its messages and groups, for good."""
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidArgument(f"deleting {subject!r} takes its messages with it: say --yes")
        sys.stderr.write(f"delete {subject!r} with all its messages and groups? Type its name to go on: ")
        sys.stderr.flush()
        if sys.stdin.readline().strip() != subject:
            raise InvalidArgument("not deleted")
    with_client(server, lambda client: client.admin.delete_subject(subject))
    sys.stderr.write(f"deleted {subject}\n")


def _print_subject(subject: SubjectInfo) -> None:
    several = "," in subject.partition
    print_facts(
        [
            ("subject", subject.subject),
            ("partitions" if several else "partition", subject.partition),
            ("messages", f"{subject.count:,}"),
            ("size", words_of_size(subject.size)),
            # Each partition has sequences of its own.
            *([] if several else [("sequences", f"{subject.start} up to {subject.end}")]),
            ("kept for", words_of_seconds(subject.retention_seconds)),
            ("kept at least", "-" if subject.retention_bytes is None else words_of_size(subject.retention_bytes)),
            ("groups", str(subject.groups)),
            ("created", words_of_time(subject.created)),
        ]
    )
