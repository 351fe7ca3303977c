"""``plait cluster``: the brokers of a cluster and their states."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from plait.cli.options import NODE, NodeOptions, described
from plait.cli.output import print_facts, print_json, print_result, print_rows

if TYPE_CHECKING:
    from plait.wire.admin.cluster import BrokerInfo, LostPartition

app = App(name="cluster", help="List the brokers of a cluster and set their states.")

Group = Annotated[str, described("The broker group.")]


@app.command
def brokers(*, node: NodeOptions = NODE) -> None:
    """List all brokers. State NRW: the broker is lost, or set to take no reads and no writes."""
    columns: dict[str, Callable[[BrokerInfo], str]] = {
        "group": lambda b: b.group,
        "address": lambda b: b.address,
        "state": lambda b: b.state,
        "wished": lambda b: b.wished,
        "epoch": lambda b: str(b.epoch),
        "partitions": lambda b: f"{b.partitions:,}",
        "reason": lambda b: b.reason,
    }
    found = node.run(lambda client: client.admin.brokers())
    print_rows(found, columns, node.output, right=("epoch", "partitions"))


@app.command
def forget(
    group: Group,
    /,
    *,
    lost: Annotated[
        bool, Parameter(negative="", help="Remove the group even if unconsumed messages are lost; they are listed.")
    ] = False,
    node: NodeOptions = NODE,
) -> None:
    """Remove a broker group that is permanently offline; its subjects move to the other groups."""
    found = node.run(lambda client: client.admin.forget_broker(group, lost=lost))
    if node.output == "json":
        print_json(found)
        return
    print_facts([("forgotten", group), ("lost", "nothing: all messages were consumed" if not found else "")])
    if found:
        columns: dict[str, Callable[[LostPartition], str]] = {
            "subject": lambda p: p.subject,
            "partition": lambda p: p.partition,
            "took": lambda p: f"{p.takes:,}",
            "not finished by": lambda p: ", ".join(f"{name} ({count:,})" for name, count in p.groups.items()) or "-",
        }
        print_rows(found, columns, right=("took",))


@app.command
def state(
    group: Group,
    wished: Annotated[
        Literal["RW", "R", "W", "NRW"],
        described(
            "Unless RW, no new partition is placed here. With R or NRW, messages go elsewhere too, where possible."
        ),
    ],
    /,
    *,
    node: NodeOptions = NODE,
) -> None:
    """Set the wished state of a broker group; clients see it when they next refresh their routes."""
    node.run(lambda client: client.admin.set_broker_state(group, wished))
    print_result(node.output, {"group": group, "wished": wished})
