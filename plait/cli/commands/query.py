"""``plait query``: finds stored messages by key, message id, headers and time."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from plait.cli.commands.tail import fields_of
from plait.cli.options import NODE, NodeOptions, described, duration_of, signed
from plait.cli.output import print_json, print_rows, shortened, shown_body

if TYPE_CHECKING:
    from plait.client.client import Client
    from plait.client.read.query import QueryResult


def query(
    subject: Annotated[str, described("The subject to search.")],
    /,
    *,
    key: Annotated[str | None, described("Messages with this key.")] = None,
    message_id: Annotated[
        str | None, Parameter(name="--id", help="The message with this id, as plait tail -o json prints it.")
    ] = None,
    where: Annotated[str | None, described("Messages that match, as in \"city = 'BJS'\".")] = None,
    tag: Annotated[list[str] | None, described("Messages with this tag; give it again for another one.")] = None,
    since: Annotated[str | None, signed("Stored at this time or later, as in 2025-01-31T12:00 or -5m.")] = None,
    until: Annotated[str | None, signed("Stored before this time.")] = None,
    limit: Annotated[int, described("End after this many messages.")] = 100,
    token: Annotated[str | None, described("Continue the query that printed this token.")] = None,
    scan_count: Annotated[int | None, described("End after this many messages were examined.")] = None,
    scan_time: Annotated[str | None, described("End after this time, as in 10s.")] = None,
    node: NodeOptions = NODE,
) -> None:
    """Find stored messages, in the order in which they were stored."""
    scan: dict[str, Any] = {}
    if scan_count is not None:
        scan["scan_count"] = scan_count
    if scan_time is not None:
        scan["scan_seconds"] = duration_of(scan_time)

    async def find(client: Client) -> QueryResult:
        return await client.query(
            subject,
            key=key,
            message_id=message_id,
            where=where,
            tags=tag,
            since=since,
            until=until,
            limit=limit,
            token=token,
            **scan,
        )

    _show(node.run(find), node.output)


def _show(result: QueryResult, output: str) -> None:
    if output == "json":
        print_json(
            {
                "messages": [fields_of(message) for message in result],
                "partial": result.partial,
                "reason": result.reason,
                "reached": {str(place): sequence for place, sequence in result.reached.items()},
                "token": result.token,
                "examined_count": result.examined_count,
                "examined_bytes": result.examined_bytes,
            }
        )
        return
    columns = {
        "stored": lambda message: message.store_time.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3],
        "partition": lambda message: str(message.partition),
        "sequence": lambda message: str(message.sequence),
        "message id": lambda message: str(message.message_id),
        "key": lambda message: message.key or "",
        "body": lambda message: shortened(shown_body(message.body)),
    }
    print_rows(result.messages, columns, right=["sequence"])
    if result.partial:
        sys.stdout.write(f"partial: {result.reason}\n")
    if result.token is not None:
        sys.stdout.write(f"continue with --token {result.token}\n")
