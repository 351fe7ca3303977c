"""``plait send``: one message from the arguments, or many from a file or standard input."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from plait.cli.event_loop import with_client
from plait.cli.options import DEFAULT_SERVER, Output, Server, delay_of, described, time_of
from plait.cli.output import format_time_exactly, print_json_line, print_table
from plait.cli.progress import ProgressSteps
from plait.errors import BufferFull, InvalidArgument, PlaitError, TooLarge
from plait.limits import BODY_SIZE_MAX, MIB
from plait.model.names import counted

if TYPE_CHECKING:
    from plait.client.client import Client
    from plait.client.types import HeaderValue, Receipt, Ticket

#: Bytes of one read from a file or a pipe.
BLOCK_SIZE = 1 * MIB
#: The most tickets without a receipt. Above it, the oldest is awaited.
TICKETS_MAX = 50_000


def send(
    subject: Annotated[str, described("The subject to send to.")],
    body: Annotated[str | None, described("The message; omitted or '-': read standard input.")] = None,
    /,
    *,
    key: Annotated[str | None, described("Order key of every message sent.")] = None,
    tag: Annotated[list[str] | None, described("A tag; may be repeated.")] = None,
    header: Annotated[
        list[str] | None, described("name=text, or name:=value for a number, true or false; may be repeated.")
    ] = None,
    to_group: Annotated[str | None, described("Only this group gets the messages.")] = None,
    file: Annotated[Path | None, described("Send a file's content; '-' is standard input.")] = None,
    lines: Annotated[
        bool | None,
        Parameter(
            negative="--no-lines",
            help="Whether each line is a message: the default for standard input; a file is one message.",
        ),
    ] = None,
    delay: Annotated[
        str | None, described("Deliver it this much later: 10s, 5m, or level3 of RocketMQ's levels.")
    ] = None,
    deliver_at: Annotated[
        str | None, described("Deliver it at this time, such as 2025-01-31T12:00 (UTC unless it has an offset).")
    ] = None,
    priority: Annotated[int, described("0 to 9: messages with a higher priority are delivered first.")] = 0,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """Send one message, or each line of standard input as one; print the receipts."""
    if body is not None and file is not None and body != "-":
        raise InvalidArgument("give a body or --file, not both")
    from_stdin = (body in (None, "-") and file is None) or str(file) == "-"
    if lines is None:
        lines = from_stdin
    options = {
        "key": key,
        "tags": tag,
        "delay": None if delay is None else delay_of(delay),
        "deliver_at": None if deliver_at is None else time_of(deliver_at),
        "headers": headers_of(header),
        "to_group": to_group,
        "priority": priority,
    }
    sending = SendRun(subject, options, json=output == "json")
    if not from_stdin and file is None:
        assert body is not None
        text = body.encode("utf-8", "surrogateescape")
        with_client(server, lambda client: sending.one(client, text))
        return
    fd = 0 if from_stdin else _open(file)
    if from_stdin and sys.stdin.isatty():
        sys.stderr.write("one message a line; end with Ctrl-D\n")
    if lines:
        with_client(server, lambda client: sending.lines(client, fd))
    else:
        content = _whole(fd)
        with_client(server, lambda client: sending.one(client, content))


class SendRun:
    """One run of the command. ``options`` are the arguments of the client's methods."""

    def __init__(self, subject: str, options: dict[str, Any], *, json: bool) -> None:
        self._subject = subject
        self._options = options
        self._json = json
        self._count = 0
        self._first: Receipt | None = None
        self._last: Receipt | None = None

    async def one(self, client: Client, body: bytes) -> None:
        receipt = await client.send(self._subject, body, **self._options)
        self._add_receipt(receipt)
        if not self._json:
            place = ["sequence"] if receipt.deliver_at is None else ["number", "deliver at"]
            print_table(["subject", "partition", *place, "message id"], [(self._subject, *_cells(receipt))])

    async def lines(self, client: Client, fd: int) -> None:
        """Send each line as a message, as the lines arrive, and print the receipts or a summary."""
        begun = time.monotonic()
        tickets: deque[Ticket] = deque()
        size = 0
        try:
            with ProgressSteps() as steps:
                steps.step(f"sending to {self._subject}")
                async for block in _blocks(fd):
                    size += sum(map(len, block))
                    for line in block:
                        await self._post(client, line, tickets)
                    while tickets and (tickets[0].done or len(tickets) > TICKETS_MAX):
                        self._add_receipt(await tickets.popleft())
                    steps.update(self._count)
                    if self._json:
                        sys.stdout.flush()
                while tickets:
                    self._add_receipt(await tickets.popleft())
                    steps.update(self._count)
        except PlaitError as error:
            sys.stderr.write(f"stored before this: {counted(self._count, 'message')}\n")
            raise error from None
        if not self._json:
            self._summary(size, time.monotonic() - begun)

    async def _post(self, client: Client, line: bytes, tickets: deque[Ticket]) -> None:
        while True:
            try:
                ticket = client.post(self._subject, line, **self._options)
            except BufferFull:
                if not tickets:
                    await client.flush()
                else:
                    self._add_receipt(await tickets.popleft())
            else:
                tickets.append(ticket)
                return

    def _add_receipt(self, receipt: Receipt) -> None:
        self._count += 1
        self._first = self._first or receipt
        self._last = receipt
        if self._json:
            fields: dict[str, Any] = {
                "subject": self._subject,
                "partition": str(receipt.partition),
                "sequence": receipt.sequence,
                "message_id": str(receipt.message_id),
            }
            if receipt.deliver_at is not None:
                fields |= {"number": receipt.schedule, "deliver_at": receipt.deliver_at}
            print_json_line(fields)

    def _summary(self, size: int, seconds: float) -> None:
        if self._count == 0:
            sys.stderr.write("nothing to send\n")
            return
        assert self._first is not None
        assert self._last is not None
        rate = f"{self._count / seconds:,.0f}/s" if seconds >= 0.1 else ""
        columns = ("subject", "partition", "messages", "bytes", "first", "last", "seconds", "rate")
        row = (
            self._subject,
            str(self._last.partition),
            f"{self._count:,}",
            f"{size:,}",
            str(_number(self._first)),
            str(_number(self._last)),
            f"{seconds:.2f}",
            rate,
        )
        print_table(columns, [row], right=columns[2:])


def _number(receipt: Receipt) -> int | None:
    return receipt.sequence if receipt.deliver_at is None else receipt.schedule


def _cells(receipt: Receipt) -> list[str]:
    when = [] if receipt.deliver_at is None else [format_time_exactly(receipt.deliver_at)]
    return [str(receipt.partition), str(_number(receipt)), *when, str(receipt.message_id)]


def headers_of(given: list[str] | None) -> dict[str, HeaderValue] | None:
    """Parse ``name=text`` and ``name:=value``."""
    if not given:
        return None
    headers: dict[str, HeaderValue] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.rstrip(":"):
            raise InvalidArgument(f"header {text!r} is not understood; write name=text or name:=value")
        if not name.endswith(":"):
            headers[name] = value
            continue
        try:
            headers[name[:-1]] = msgspec.json.decode(value, type=bool | int | float | str)
        except msgspec.MsgspecError:
            raise InvalidArgument(
                f"header {text!r}: {value!r} is not a number, true, false or quoted text; write {name[:-1]}= for text"
            ) from None
    return headers


def _open(file: Path | None) -> int:
    assert file is not None
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidArgument(f"file {str(file)!r} cannot be read: {error.strerror}") from None


def _whole(fd: int) -> bytes:
    """Read to the end, up to the largest size of a message."""
    parts = []
    size = 0
    while part := os.read(fd, BLOCK_SIZE):
        parts.append(part)
        size += len(part)
        if size > BODY_SIZE_MAX:
            raise TooLarge(
                f"the input is larger than a message ({BODY_SIZE_MAX} bytes at most); use --lines or split it"
            )
    return b"".join(parts)


async def _blocks(fd: int) -> AsyncIterator[list[bytes]]:
    """The lines of each read, without newlines. The last line need not end with one."""
    loop = asyncio.get_running_loop()
    rest: list[bytes] = []
    rest_size = 0
    while block := await loop.run_in_executor(None, os.read, fd, BLOCK_SIZE):
        *whole, tail = block.split(b"\n")
        if whole:
            whole[0] = b"".join([*rest, whole[0]])
            rest, rest_size = [], 0
            yield whole
        if tail:
            rest.append(tail)
            rest_size += len(tail)
            if rest_size > BODY_SIZE_MAX:
                raise TooLarge(f"a line is larger than a message ({BODY_SIZE_MAX} bytes at most); split it")
    if rest:
        yield [b"".join(rest)]
