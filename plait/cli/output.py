"""Prints tables and JSON, and formats values."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plait.model.reason import Reason

T = TypeVar("T")

#: Characters of a reason in a listing.
TEXT_WIDTH = 60
#: The width of a table where no terminal sets one: nothing is cut.
_UNLIMITED = 10_000


def console(*, stderr: bool = False) -> Console:
    """A console for the terminal. A file or pipe gets unwrapped lines without colours."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else _UNLIMITED, highlight=False)


def print_json(value: Any) -> None:
    """Print one value, indented."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_json_line(value: Any) -> None:
    """Print one value on one line, for streams of values."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def print_rows(
    values: Sequence[T],
    columns: Mapping[str, Callable[[T], str]],
    output: str = "table",
    *,
    right: Sequence[str] = (),
    fields: Callable[[T], Any] | None = None,
) -> None:
    """Print a table of the values with these columns; with ``output`` "json" a list of them, or of their ``fields``."""
    if output == "json":
        print_json(values if fields is None else [fields(value) for value in values])
    else:
        print_table(tuple(columns), ([cell(value) for cell in columns.values()] for value in values), right=right)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = (), title: str | None = None
) -> None:
    """Print a table. The columns in ``right`` are right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    print_lines(table)


def print_result(output: str, fields: Any, facts: Iterable[tuple[str, str]] | None = None) -> None:
    """Print the result of a command: the ``fields`` with ``output`` "json", else the ``facts`` or the fields."""
    if output == "json":
        print_json(fields)
    else:
        print_facts([(name, str(value)) for name, value in fields.items()] if facts is None else facts)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print names and values, one per line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, Text(printable(value)))
    print_lines(table)


def print_lines(renderable: Any) -> None:
    """Print what rich can render, without the padding of its last column."""
    out = console()
    with out.capture() as capture:
        out.print(renderable)
    for line in capture.get().splitlines():
        sys.stdout.write(line.rstrip() + "\n")


def printable(text: str) -> str:
    """Text that is safe for a terminal: control characters become escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown_body(body: bytes) -> str:
    """A body as text. Bytes that are not UTF-8 become escapes."""
    return printable(body.decode("utf-8", "backslashreplace"))


def reason_fields(reason: Reason) -> dict[str, str]:
    return {"type": reason.type, "text": reason.text, "handler": reason.handler}


def text_or_base64(body: bytes) -> dict[str, str]:
    """A body as a JSON field: ``body``, or ``body_base64`` if it is not UTF-8."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def shortened(text: str, width: int = TEXT_WIDTH) -> str:
    """Printable text of at most ``width`` characters."""
    text = printable(text)
    return text if len(text) <= width else text[: width - 3] + "..."


def format_size(size: int) -> str:
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError


def format_duration(seconds: float | None) -> str:
    """A duration; None is unlimited."""
    if seconds is None:
        return "forever"
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:g}s"


def format_micros(micros: int) -> str:
    """Microseconds since 1970 as a UTC time, to the second."""
    return format_time(datetime.fromtimestamp(micros / 1_000_000, UTC))


def format_time(moment: datetime) -> str:
    """A UTC time, to the second."""
    return moment.strftime("%Y-%m-%d %H:%M:%SZ")


def format_time_exactly(moment: datetime) -> str:
    """A UTC time, to the microsecond: the time by which a delayed message is found."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
