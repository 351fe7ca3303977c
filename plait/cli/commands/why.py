"""``plait why``: explains where a message is for a group, and why."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec

from plait.cli.options import NODE, NodeOptions, described
from plait.cli.output import format_time_exactly, print_json, print_table, printable


def why(
    message_id: Annotated[str, described("The id of the message, as plait query prints it.")],
    /,
    *,
    group: Annotated[str, described("The consumer group.")],
    subject: Annotated[str | None, described("Its subject. Default: all subjects that the group consumes.")] = None,
    node: NodeOptions = NODE,
) -> None:
    """Explain where a message is for a group, with the events of its history, the newest first."""
    found = node.run(lambda client: client.why(message_id, group=group, subject=subject))
    if node.output == "json":
        fields = msgspec.structs.asdict(found)
        fields["message_id"] = str(found.message_id)
        fields["partition"] = None if found.partition is None else str(found.partition)
        print_json(fields)
        return
    sys.stdout.write(printable(found.text) + "\n")
    if found.history:
        rows = [
            (format_time_exactly(event.time), event.text + ("" if event.certain else " (or another key)"))
            for event in found.history
        ]
        print_table(("time", "event"), rows)
    if found.partial:
        sys.stdout.write("partial: enough was read; earlier events are not listed\n")
