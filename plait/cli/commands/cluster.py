"""``plait cluster``: the brokers of a cluster and their states."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import App, Parameter

from plait.cli.event_loop import with_client
from plait.cli.options import DEFAULT_SERVER, Output, Server
from plait.cli.output import print_facts, print_json, print_table

app = App(name="cluster", help="List the brokers of a cluster and set their states.")


@app.command
def brokers(*, server: Server = DEFAULT_SERVER, output: Output = "table") -> None:
    """List all brokers. State NRW: the broker is lost, or set to take no reads and no writes."""
    found = with_client(server, lambda client: client.admin.brokers())
    if output == "json":
        print_json(found)
        return
    columns = ("group", "address", "state", "wished", "epoch", "partitions", "reason")
    rows = ((b.group, b.address, b.state, b.wished, str(b.epoch), f"{b.partitions:,}", b.reason) for b in found)
    print_table(columns, rows, right=columns[4:6])


@app.command
def forget(
    group: Annotated[str, Parameter(help="The broker group.")],
    /,
    *,
    lost: Annotated[
        bool, Parameter(negative="", help="Also if unconsumed messages are lost with it; they are listed.")
    ] = False,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """Remove a broker group that is permanently offline; its subjects move to the other groups."""
    found = with_client(server, lambda client: client.admin.forget_broker(group, lost=lost))
    if output == "json":
        print_json(found)
        return
    print_facts([("forgotten", group), ("lost", "nothing that was not consumed" if not found else "")])
    if found:
        columns = ("subject", "partition", "took", "not finished by")
        rows = (
            (
                each.subject,
                each.partition,
                f"{each.takes:,}",
                ", ".join(f"{name} ({count:,})" for name, count in each.groups.items()) or "-",
            )
            for each in found
        )
        print_table(columns, rows, right=columns[2:3])


@app.command
def state(
    group: Annotated[str, Parameter(help="The broker group.")],
    wished: Annotated[
        Literal["RW", "R", "W", "NRW"],
        Parameter(help="Below RW, new partitions are placed elsewhere; with R or NRW also messages, where possible."),
    ],
    /,
    *,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """Set the wished state of a broker group; clients see it when they next refresh their routes."""
    with_client(server, lambda client: client.admin.set_broker_state(group, wished))
    if output == "json":
        print_json({"group": group, "wished": wished})
    else:
        print_facts([("group", group), ("wished", wished)])
