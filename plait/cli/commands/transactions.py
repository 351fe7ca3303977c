"""``plait transactions``: lists, shows, commits and rolls back transactions that wait for their outcome."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import App

from plait.cli.options import NODE, NodeOptions, described
from plait.cli.output import (
    format_size,
    format_time,
    format_time_exactly,
    print_json,
    print_result,
    print_rows,
    shown_body,
    text_or_base64,
)

if TYPE_CHECKING:
    from plait.client.transactions.transaction_info import HalfMessage, TransactionInfo

app = App(name="transactions", help="List, show, commit and roll back undecided transactions.")

Id = Annotated[str, described("The transaction's id, as `plait transactions list` shows it.")]


@app.command(name="list")
def list_transactions(
    *,
    state: Annotated[Literal["open", "parked"] | None, described("Only transactions in this state.")] = None,
    producer_group: Annotated[str | None, described("Only transactions of this producer group.")] = None,
    node: NodeOptions = NODE,
) -> None:
    """List the transactions that are not decided, the oldest first."""
    found = node.run(lambda client: client.admin.transactions(state=state, producer_group=producer_group))
    columns: dict[str, Callable[[TransactionInfo], str]] = {
        "id": lambda each: each.id,
        "producer group": lambda each: each.producer_group,
        "state": lambda each: each.state,
        "begun": lambda each: format_time(each.begun),
        "checks": lambda each: str(each.checks),
        "messages": lambda each: f"{each.count:,}",
        "size": lambda each: format_size(each.size),
        "subjects": lambda each: ", ".join(each.subjects),
        "broker group": lambda each: each.group,
    }
    print_rows(found, columns, node.output, right=("checks", "messages", "size"), fields=_listed)


@app.command
def show(transaction: Id, /, *, node: NodeOptions = NODE) -> None:
    """Show a transaction and its first messages."""
    found = node.run(lambda client: client.admin.transaction(transaction))
    facts = [
        ("id", found.id),
        ("producer group", found.producer_group),
        ("state", found.state),
        ("begun", format_time(found.begun)),
        ("checks", str(found.checks)),
        ("messages", f"{found.count:,}"),
        ("size", format_size(found.size)),
        ("subjects", ", ".join(found.subjects)),
        ("broker group", found.group),
    ]
    for message in found.messages:
        due = "" if message.deliver_at is None else f", due {format_time_exactly(message.deliver_at)}"
        key = "" if message.key is None else f", key {message.key}"
        facts.append((f"{message.subject}{key}{due}", shown_body(message.body)))
    fields = _listed(found) | {"messages": [_message_fields(message) for message in found.messages]}
    print_result(node.output, fields, facts)


@app.command
def commit(transaction: Id, /, *, node: NodeOptions = NODE) -> None:
    """Commit a transaction: its messages become visible."""
    node.run(lambda client: client.admin.commit_transaction(transaction))
    _report(transaction, "committed", node)


@app.command
def rollback(transaction: Id, /, *, node: NodeOptions = NODE) -> None:
    """Roll a transaction back: its messages are deleted."""
    node.run(lambda client: client.admin.rollback_transaction(transaction))
    _report(transaction, "rolled back", node)


def _report(transaction: str, outcome: str, node: NodeOptions) -> None:
    if node.output == "json":
        print_json({"id": transaction, "outcome": outcome})
    else:
        sys.stderr.write(f"transaction {transaction} is {outcome}\n")


def _listed(transaction: TransactionInfo) -> dict[str, Any]:
    fields = msgspec.structs.asdict(transaction)
    del fields["messages"]
    return fields


def _message_fields(message: HalfMessage) -> dict[str, Any]:
    """A message as JSON fields. A body that is not UTF-8 is in ``body_base64`` instead of ``body``."""
    fields = msgspec.structs.asdict(message) | {"message_id": str(message.message_id)}
    return fields | text_or_base64(fields.pop("body"))
