"""``plait spark replay``: sends messages of an archive and the live log again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from plait.cli.commands.spark.selection_options import Where
from plait.cli.event_loop import with_client
from plait.cli.options import DEFAULT_SERVER, Output, Server, described, flag
from plait.cli.output import format_size, format_time, print_facts, print_json
from plait.cli.progress import ProgressSteps
from plait.errors import InvalidArgument

if TYPE_CHECKING:
    from plait.client.client import Client
    from plait.spark.history.replay import Counted, Replayed

_RATE = re.compile(r"(\d+(?:\.\d+)?)(?:/(s|m|h))?")
_SECONDS = {None: 1, "s": 1, "m": 60, "h": 3600}


def replay(
    where: Where,
    *,
    to: Annotated[str, described("The subject to send to.")],
    rate: Annotated[
        str | None,
        described("The rate, as in 500/s or 100/m; default: as fast as messages are stored."),
    ] = None,
    state: Annotated[
        Path | None, described("A file to resume from after a crash: the same command sends the rest.")
    ] = None,
    limit: Annotated[int | None, described("Only the first this many.")] = None,
    live: Annotated[bool, flag("Also messages of --server that are not archived; instead of --data.")] = False,
    count: Annotated[bool, flag("Count the messages and send nothing.")] = False,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """Send messages of an archive and the live log again, in order, marked by headers."""
    from plait.spark.history.replay import Replay

    per_second = None if rate is None else _rate_of(rate)
    with where.open(server if live else None) as opened:
        selection = where.selection(opened, limit=limit)
        requested = {"since": where.since, "until": where.until}
        work = Replay(opened, selection, to, rate=per_second, limit=limit, state=state, requested=requested)
        with ProgressSteps() as steps:
            if count:
                _count(work.count(steps), output)
                return

            async def run(client: Client) -> Replayed:
                return await work.run(client, steps)

            done = with_client(server, run)
    if output == "json":
        print_json({"to": to, "run": done.run, "sent": done.sent, "before": done.before})
    else:
        earlier = f", {done.before:,} before" if done.before else ""
        print_facts([("to", to), ("run", done.run), ("sent", f"{done.sent:,}{earlier}")])


def _count(found: Counted, output: Output) -> None:
    if output == "json":
        print_json(found._asdict())
        return
    moments = ["" if moment is None else format_time(moment) for moment in (found.first, found.last)]
    print_facts(
        [
            ("messages", f"{found.messages:,}"),
            ("bodies", format_size(found.size)),
            ("keys", f"{found.keys:,}"),
            ("first stored", moments[0]),
            ("last stored", moments[1]),
        ]
    )


def _rate_of(text: str) -> float:
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise InvalidArgument(f"rate {text!r} is not understood; write messages per second, as in 500/s or 100/m")
    return float(match[1]) / _SECONDS[match[2]]
