"""``plait tail``: prints messages as they arrive, without a group or as a member of one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from plait.cli.event_loop import with_client
from plait.cli.options import DEFAULT_SERVER, Server, described, duration_of, signed
from plait.cli.output import print_json_line, printable, shown_body, text_or_base64
from plait.errors import InvalidArgument

if TYPE_CHECKING:
    from plait.client.client import Client
    from plait.client.types import Message

#: Messages of one fetch.
FETCH_COUNT = 500
#: How long one fetch waits, without ``--wait``.
FETCH_SECONDS = 60.0


def tail(
    subject: Annotated[str, described("The subject to read.")],
    /,
    *,
    start: Annotated[
        str | None,
        signed(
            "latest, earliest, a sequence, -5m before now, or a time such as 2025-01-31T12:00. "
            "Default: latest; earliest for a new group."
        ),
    ] = None,
    count: Annotated[int | None, described("End after this many messages.")] = None,
    wait: Annotated[str | None, described("End when no message arrived for this long, as in 5s.")] = None,
    group: Annotated[str | None, described("Consume as a member of this group, and ack what is printed.")] = None,
    where: Annotated[str | None, described("Only messages that match, as in \"city = 'BJS'\".")] = None,
    tag: Annotated[list[str] | None, described("Only messages with this tag; give it again for another one.")] = None,
    server: Server = DEFAULT_SERVER,
    output: Annotated[
        Literal["table", "json", "raw"],
        Parameter(name=("--output", "-o"), help="Columns, one JSON object per line, or the raw bodies."),
    ] = "table",
) -> None:
    """Print messages as they arrive, until Ctrl-C."""
    _check(count, group, filtered=where is not None or bool(tag))
    quiet = FETCH_SECONDS if wait is None else duration_of(wait)
    show = {"table": _show_columns, "json": _show_json, "raw": _show_raw}[output]
    left = count

    def wanted() -> int:
        return FETCH_COUNT if left is None else min(FETCH_COUNT, left)

    def show_all(messages: Sequence[Message]) -> bool:
        """Print messages. Returns False if there are none for the time of ``--wait``."""
        nonlocal left
        for message in messages:
            show(message)
        # Output must be visible before the ack, and a reader of the pipe wants it at once.
        sys.stdout.flush()
        if left is not None:
            left -= len(messages)
        return bool(messages) or wait is None

    async def read(client: Client) -> None:
        if group is None:
            async with client.reader(subject, start=start or "latest", where=where, tags=tag) as reader:
                while left != 0 and show_all(await reader.fetch(wanted(), quiet)):
                    pass
            return
        # Prefetching more than is printed would withhold messages from other members.
        member = client.consumer(subject, group, start=start, prefetch=wanted())
        # A consumer would create the subject: a misspelt name must not. Wrong arguments are refused before this.
        await client.admin.subject(subject)
        async with member as consumer:
            while left != 0:
                batch = await consumer.fetch(wanted(), quiet)
                if not show_all(batch):
                    return
                await batch.ack()

    with_client(server, read)


def _check(count: int | None, group: str | None, *, filtered: bool) -> None:
    if count is not None and count < 1:
        raise InvalidArgument(f"--count must be 1 or more, not {count}")
    if group is not None and filtered:
        raise InvalidArgument("--where and --tag read without a group; leave --group out")


def _show_columns(message: Message) -> None:
    time = message.store_time.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    parts = [time, f"#{message.sequence}"]
    if message.key is not None:
        parts.append(f"key={printable(message.key)}")
    if message.tags:
        parts.append(f"tags={','.join(map(printable, message.tags))}")
    parts += [f"{printable(name)}={printable(str(value))}" for name, value in message.headers.items()]
    if message.attempt > 1:
        parts.append(f"attempt={message.attempt}")
    parts.append(shown_body(message.body))
    sys.stdout.write("  ".join(parts) + "\n")


def _show_json(message: Message) -> None:
    print_json_line(fields_of(message))


def _show_raw(message: Message) -> None:
    sys.stdout.buffer.write(message.body + b"\n")


def fields_of(message: Message) -> dict[str, Any]:
    """A message as JSON fields. A body that is not UTF-8 is in ``body_base64`` instead of ``body``."""
    fields: dict[str, Any] = {
        "subject": message.subject,
        "partition": str(message.partition),
        "sequence": message.sequence,
        "message_id": str(message.message_id),
        "key": message.key,
        "tags": message.tags,
        "headers": message.headers,
        "send_time": message.send_time,
        "store_time": message.store_time,
        "attempt": message.attempt,
    }
    if message.deliver_at is not None:
        fields["deliver_at"] = message.deliver_at
    return fields | text_or_base64(message.body)
