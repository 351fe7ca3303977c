"""The options that select messages of a history, shared by ``plait spark history`` and ``plait spark replay``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from plait.cli.options import described, flag, signed
from plait.errors import InvalidArgument

if TYPE_CHECKING:
    from plait.spark.history.lookup import History
    from plait.spark.history.selection import HistorySelection


@Parameter(name="*")
@dataclass
class Where:
    """The messages to select, and the inputs to read them from."""

    archive: Annotated[str, described("The archive: a path, or a URI such as s3://bucket/archive.")]
    subject: Annotated[str, described("The subject of the messages.")]
    data: Annotated[
        list[Path] | None,
        described("A data directory, in use or not, with messages that are not archived; may be repeated."),
    ] = None
    group: Annotated[str, described("The broker group of a data directory that was never archived.")] = "g1"
    key: Annotated[str | None, described("Messages with this order key.")] = None
    id: Annotated[str | None, described("The message with this id, as receipts print it.")] = None
    header: Annotated[list[str] | None, described("Messages with this header, as name=value; may be repeated.")] = None
    since: Annotated[
        str | None,
        signed("Stored at or after this time: 2025-01-31T12:00 (UTC), or -5m before now."),
    ] = None
    until: Annotated[str | None, signed("Stored before this time.")] = None
    all: Annotated[bool, flag("Every message of the subject.")] = False

    def open(self, server: str | None = None) -> History:
        """Open the history. ``server`` has messages that are not archived."""
        from plait.spark.history.lookup import History

        return History(self.archive, data=self.data, server=server, group=self.group)

    def selection(self, history: History, *, limit: int | None = None) -> HistorySelection:
        """The selection of the options. Raises ``InvalidArgument`` if they select nothing explicitly."""
        selection = history.selection(
            self.subject,
            key=self.key,
            message_id=self.id,
            headers=_headers(self.header or []),
            since=self.since,
            until=self.until,
        )
        if self.all and selection.narrow:
            raise InvalidArgument("--all selects every message; remove it or --key, --id, --header, --since, --until")
        if not (self.all or selection.narrow or limit is not None):
            raise InvalidArgument(
                "select messages: --key, --id, --header, --since, --until or --limit; --all for every message"
            )
        return selection


def _headers(texts: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, value in map(_header, texts):
        if headers.setdefault(name, value) != value:
            raise InvalidArgument(f"header {name!r} cannot be both {headers[name]!r} and {value!r}; use one of them")
    return headers


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidArgument(f"header {text!r} is not understood; write name=value")
    return name, value
