"""The conditions of a lookup in a subject's history.

The same conditions apply to rows of an archive and of a log: both have the columns of ``spark_columns``. Header values
are compared as text, as the columns have them: ``amount=5`` finds the number and the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from plait.client.arguments import moment_of, shown
from plait.client.send.encoding import encode_key
from plait.errors import InvalidArgument
from plait.frame.header import SEQUENCE_MAX, TIME_MAX
from plait.model import names
from plait.spark.source import arrow_scalars as bare

#: A time as users give it: a datetime, ISO 8601, or "-5m" before now.
When = datetime | timedelta | str

Rows = TypeVar("Rows", pa.RecordBatch, pa.Table)

_MESSAGE_ID: Final = re.compile(r"[0-9a-f]{16}-(?:0|[1-9]\d{0,19})")


class HistorySelection(NamedTuple):
    """Selects the messages of a subject that match all conditions."""

    subject: str
    key: str | None = None
    message_id: str | None = None
    #: Names and the text of their values.
    headers: tuple[tuple[str, str], ...] = ()
    #: Store times in microseconds, both inclusive.
    time_min: int = 0
    time_max: int = TIME_MAX

    @classmethod
    def of(
        cls,
        subject: str,
        *,
        now: int,
        key: str | int | None = None,
        message_id: object = None,
        headers: Mapping[str, Any] | None = None,
        since: When | None = None,
        until: When | None = None,
    ) -> HistorySelection:
        """Check the arguments of a user; ``since`` is inclusive, ``until`` exclusive. Raises ``InvalidArgument``."""
        begin, end = period_of(since, until, now)
        return cls(
            names.check("subject", subject),
            None if key is None else encode_key(key),
            None if message_id is None else _id_of(message_id),
            tuple((_name_of(name), text_of(value)) for name, value in (headers or {}).items()),
            0 if begin is None else begin,
            TIME_MAX if end is None else end - 1,
        )

    @property
    def narrow(self) -> bool:
        """Whether there is a condition besides the subject."""
        return self != HistorySelection(self.subject)

    @property
    def few(self) -> bool:
        """Whether it selects one key or one message."""
        return self.key is not None or self.message_id is not None

    @property
    def columns(self) -> list[str]:
        """The columns of its conditions."""
        return list(dict.fromkeys(column for column, _ in self._conditions()))

    @property
    def limits(self) -> dict[str, tuple[Any, Any]]:
        """The conditions that statistics of row groups can decide (``parquet_files.Limits``)."""
        limits: dict[str, tuple[Any, Any]] = {"store_time": (self.time_min, self.time_max)}
        for column, value in (("key", self.key), ("message_id", self.message_id)):
            if value is not None:
                limits[column] = (value.encode(), value.encode())
        return limits

    def matching(self, rows: Rows) -> Rows:
        """The matching rows; ``rows`` must have the columns of all conditions."""
        for column, condition in self._conditions():
            if not rows.num_rows:
                break
            rows = rows.filter(condition(rows[column]))
        return rows

    def _conditions(self) -> Iterable[tuple[str, Callable[[Any], Any]]]:
        """Column and condition, the cheap ones first."""
        if self.time_min > 0:
            yield "store_time", lambda times: pc.greater_equal(times, bare.moment(self.time_min))
        if self.time_max < TIME_MAX:
            yield "store_time", lambda times: pc.less_equal(times, bare.moment(self.time_max))
        if self.key is not None:
            yield "key", lambda keys: pc.equal(keys, bare.text(str(self.key)))
        if self.message_id is not None:
            yield "message_id", lambda ids: pc.equal(ids, bare.text(str(self.message_id)))
        for name, value in self.headers:
            yield "headers", partial(_has_header, name, value)


def period_of(since: When | None, until: When | None, now: int) -> tuple[int | None, int | None]:
    """Two times of a user in microseconds since 1970."""
    begin, end = moment_of(since, "since", now), moment_of(until, "until", now)
    if begin is not None and end is not None and begin >= end:
        raise InvalidArgument(f"since {shown(since)} is not before until {shown(until)}: nothing lies between")
    return begin, end


def text_of(value: Any) -> str:
    """The text of a header value, as in the columns."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise InvalidArgument(f"header value {shown(value)} is a {type(value).__name__}; use str, int, float or bool")


def _id_of(given: object) -> str:
    text = str(given)
    if not _MESSAGE_ID.fullmatch(text) or int(text[17:]) > SEQUENCE_MAX:
        raise InvalidArgument(
            f"invalid message id {shown(text)}; message ids look like 0123456789abcdef-17, as receipts print them"
        )
    return text


def _name_of(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"header name {shown(name)} is not a non-empty str")
    return name


def _has_header(name: str, value: str, headers: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    return pc.equal(pc.map_lookup(headers, name, "last"), bare.text(value))
