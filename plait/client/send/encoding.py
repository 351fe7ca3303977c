"""Converts what users pass to what frames store: bodies, order keys, tags, headers, and due times."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from plait.client.arguments import Duration, index_of, micros_of, seconds_of, shown
from plait.errors import CodecError, InvalidArgument, TooLarge
from plait.frame.columns import TAG_SEPARATOR
from plait.limits import (
    BODY_SIZE_MAX,
    DELAY_SECONDS_MAX,
    DELAY_SECONDS_MIN,
    HEADERS_SIZE_MAX,
    KEY_SIZE_MAX,
    PRIORITY_MAX,
    TAGS_MAX,
)
from plait.model import names

_json = msgspec.json.Encoder()
_headers = msgspec.msgpack.Encoder()


def encode_body(body: Any) -> bytes:
    """bytes unchanged, str as UTF-8, anything else as JSON: dicts, msgspec structs, dataclasses, pydantic models."""
    if isinstance(body, bytes):
        encoded = body
    elif isinstance(body, str):
        try:
            encoded = body.encode()
        except UnicodeEncodeError as error:
            raise CodecError(f"a body of text cannot be encoded: {error}") from None
    elif isinstance(body, bytearray | memoryview):
        encoded = bytes(body)
    elif hasattr(body, "model_dump_json"):
        encoded = body.model_dump_json().encode()
    else:
        try:
            encoded = _json.encode(body)
        except (TypeError, ValueError) as error:
            raise CodecError(f"a body of type {type(body).__name__} cannot be encoded: {error}") from None
    if len(encoded) > BODY_SIZE_MAX:
        raise body_too_large(len(encoded))
    return encoded


def _too_large(what: str, size: int, limit: str, value: int, advice: str) -> TooLarge:
    return TooLarge(f"{what} over the limit of {value}; {advice}", limit=limit, value=value, size=size)


def body_too_large(size: int) -> TooLarge:
    """The error for a body of this many bytes."""
    return _too_large(f"a body of {size} bytes is", size, "BODY_SIZE_MAX", BODY_SIZE_MAX, "store it elsewhere")


def encode_key(key: Any) -> str:
    """An order key as text: str unchanged, int in decimal."""
    if isinstance(key, str):
        text = key
    elif isinstance(key, int) and not isinstance(key, bool):
        text = str(key)
    else:
        raise InvalidArgument(f"key {key!r} is a {type(key).__name__}; use str or int")
    if not text:
        raise InvalidArgument("key '' is empty; leave it out for a message without a key")
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"key {text!r} cannot be encoded: {error}") from None
    if size > KEY_SIZE_MAX:
        raise _too_large(f"a key of {size} bytes is", size, "KEY_SIZE_MAX", KEY_SIZE_MAX, "use a shorter one")
    return text


def encode_tags(tags: Iterable[str] | str | None) -> bytes:
    """The tags joined by separators, with one at each end; empty if there are no tags."""
    if not tags:
        return b""
    tags = [tags] if isinstance(tags, str) else list(tags)
    if len(tags) > TAGS_MAX:
        raise _too_large(f"{len(tags)} tags are", len(tags), "TAGS_MAX", TAGS_MAX, "use headers for the rest")
    for tag in tags:
        names.check_tag(tag)
    return (TAG_SEPARATOR + TAG_SEPARATOR.join(tags) + TAG_SEPARATOR).encode()


def decode_tags(encoded: bytes) -> list[str]:
    """The reverse of ``encode_tags``."""
    return encoded.decode().strip(TAG_SEPARATOR).split(TAG_SEPARATOR) if encoded else []


def encode_group(group: str | None) -> bytes:
    """The name of the only group that gets a message; empty: every group."""
    return b"" if group is None else names.check_group(group).encode()


def encode_headers(headers: Mapping[str, Any] | None) -> bytes:
    """Headers as a msgpack map; empty if there are no headers."""
    if not headers:
        return b""
    for name, value in headers.items():
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"header name {name!r} is not a non-empty str")
        if not isinstance(value, str | int | float):
            raise InvalidArgument(f"header {name!r} is a {type(value).__name__}; use str, int, float or bool")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            raise InvalidArgument(f"header {name!r} does not fit 64 bits; send it as text")
    try:
        encoded = _headers.encode(dict(headers))
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"headers cannot be encoded: {error}") from None
    if len(encoded) > HEADERS_SIZE_MAX:
        size, advice = len(encoded), "put large values in the body"
        raise _too_large(f"headers of {size} bytes are", size, "HEADERS_SIZE_MAX", HEADERS_SIZE_MAX, advice)
    return encoded


#: Due times in microseconds since 1970: one for each row, or one for all.
Dues = int | npt.NDArray[np.int64]
#: Priorities: one for each row, or one for all.
Priorities = int | npt.NDArray[np.uint8]

_MAX_MICROS: Final = round(DELAY_SECONDS_MAX * 1_000_000)
_LIMITS: Final = f"use {DELAY_SECONDS_MIN * 1000:g} ms to {DELAY_SECONDS_MAX / 86400:.0f} days"
_MANY: Final = (Sequence, np.ndarray, pa.Array, pa.ChunkedArray)
#: Seconds in each of NumPy's units whose length is fixed.
_NUMPY_UNITS: Final = {
    "W": 604_800.0,
    "D": 86_400.0,
    "h": 3_600.0,
    "m": 60.0,
    **{unit: 1000.0**-power for power, unit in enumerate(("s", "ms", "us", "ns", "ps", "fs", "as"))},
}


class DelayLevel(enum.Enum):
    """The 18 delay levels of RocketMQ."""

    LEVEL_1 = timedelta(seconds=1)
    LEVEL_2 = timedelta(seconds=5)
    LEVEL_3 = timedelta(seconds=10)
    LEVEL_4 = timedelta(seconds=30)
    LEVEL_5 = timedelta(minutes=1)
    LEVEL_6 = timedelta(minutes=2)
    LEVEL_7 = timedelta(minutes=3)
    LEVEL_8 = timedelta(minutes=4)
    LEVEL_9 = timedelta(minutes=5)
    LEVEL_10 = timedelta(minutes=6)
    LEVEL_11 = timedelta(minutes=7)
    LEVEL_12 = timedelta(minutes=8)
    LEVEL_13 = timedelta(minutes=9)
    LEVEL_14 = timedelta(minutes=10)
    LEVEL_15 = timedelta(minutes=20)
    LEVEL_16 = timedelta(minutes=30)
    LEVEL_17 = timedelta(hours=1)
    LEVEL_18 = timedelta(hours=2)


Delay = Duration | DelayLevel
#: For ``send_many``: one value for all rows, or one for each.
Delays = Delay | Sequence[Delay] | npt.NDArray[Any] | pa.Array
DeliverAts = datetime | Sequence[datetime] | pa.Array


def due_of(delay: Any, deliver_at: Any, now: int) -> int:
    """The due time of a message. ``now`` and the result are rounded up, so that no message is early."""
    if delay is not None and deliver_at is not None:
        raise InvalidArgument("give a delay or deliver_at, not both")
    if deliver_at is not None:
        due = micros_of(deliver_at, "deliver_at")
        if due - now > _MAX_MICROS:
            raise InvalidArgument(f"deliver_at {deliver_at} is too far ahead; {_LIMITS} from now")
        # A time before 1970 is due at once.
        return max(due, 0)
    if isinstance(delay, DelayLevel):
        delay = delay.value
    seconds = seconds_of(delay)
    if not DELAY_SECONDS_MIN <= seconds <= DELAY_SECONDS_MAX:
        raise InvalidArgument(f"a message cannot be delayed by {shown(delay)}; {_LIMITS}")
    if isinstance(delay, timedelta):
        return now + delay // timedelta(microseconds=1)
    return now + math.ceil(round(seconds * 1_000_000, 3))


def priority_of(value: Any) -> int:
    """A priority, 0 to 9."""
    number = index_of(value, "priority")
    if not 0 <= number <= PRIORITY_MAX:
        raise InvalidArgument(f"priority {shown(value)} is out of range; use 0 to {PRIORITY_MAX}")
    return number


def priorities_of(priority: Any, count: int) -> Priorities | None:
    """The priorities of ``count`` rows, from one for all or one for each; None: all are 0."""
    if not isinstance(priority, Sequence | np.ndarray):
        return priority_of(priority) or None
    if len(priority) != count:
        raise InvalidArgument(f"{len(priority)} priorities for {count} bodies; give one for all, or one for each")
    found = np.array([priority_of(each) for each in priority], np.uint8)
    return found if found.any() else None


def dues_of(delay: Any, deliver_at: Any, now: int, count: int) -> Dues:
    """The due times of many messages: one time for all, or one for each row."""
    if delay is not None and deliver_at is not None:
        raise InvalidArgument("give a delay or deliver_at, not both")
    name, values = ("delay", delay) if delay is not None else ("deliver_at", deliver_at)
    if not isinstance(values, _MANY) or isinstance(values, str | bytes):
        return due_of(delay, deliver_at, now)
    if isinstance(values, np.ndarray) and values.ndim != 1:
        raise InvalidArgument(f"{name} is a NumPy array of {values.ndim} dimensions; use one number, or 1 dimension")
    if len(values) != count:
        raise InvalidArgument(f"{name} has {len(values)} values for {count} bodies; give one for all, or one for each")
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return _of_arrow(name, values, now)
    if isinstance(values, np.ndarray):
        return _of_numpy(name, values, now)
    dues = np.empty(count, np.int64)
    for row, value in enumerate(values):
        try:
            dues[row] = due_of(value, None, now) if name == "delay" else due_of(None, _given(value), now)
        except InvalidArgument as error:
            raise InvalidArgument(f"row {row}: {error}") from None
    return dues


def _given(value: Any) -> Any:
    if value is None:
        raise InvalidArgument("deliver_at is None; send rows without a due time in another call")
    return value


def _of_arrow(name: str, values: pa.Array | pa.ChunkedArray, now: int) -> Dues:
    kind = values.type
    if values.null_count:
        raise InvalidArgument(f"{name} has null rows; send rows without a due time in another call")
    if pa.types.is_timestamp(kind) and name == "deliver_at":
        if kind.tz is None:
            raise InvalidArgument("deliver_at has no time zone; add one, as in pa.timestamp('us', tz='UTC')")
        # A time before 1970 is due at once.
        since = np.maximum(values.cast(pa.int64()).to_numpy(), 0).astype(f"timedelta64[{kind.unit}]")
        return _of_timedeltas(name, since, 0, now)
    numbers = pa.types.is_duration(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if name == "delay" and numbers:
        return _of_numpy(name, values.to_numpy(), now)
    raise InvalidArgument(f"{name} is an Arrow column of {kind}; use seconds or durations, or times with a time zone")


def _of_numpy(name: str, values: npt.NDArray[Any], now: int) -> Dues:
    kind = values.dtype.kind
    if name != "delay" or kind not in "iufm":
        raise InvalidArgument(
            f"{name} is a NumPy array of {values.dtype}; use one of seconds or timedelta64 for delay, "
            "and datetimes with a time zone for deliver_at"
        )
    if kind == "m":
        if np.datetime_data(values.dtype)[0] not in _NUMPY_UNITS:
            raise InvalidArgument(f"delay is a NumPy array of {values.dtype}, a unit of no fixed length; use days")
        return _of_timedeltas(name, values, now, now)
    seconds = values.astype(np.float64)
    bad = np.flatnonzero(~((seconds >= DELAY_SECONDS_MIN) & (seconds <= DELAY_SECONDS_MAX)))
    if len(bad):
        raise InvalidArgument(f"row {bad[0]}: a message cannot be delayed by {values[bad[0]]}; {_LIMITS}")
    return np.ceil(np.round(seconds * 1_000_000, 3)).astype(np.int64) + now


def _of_timedeltas(name: str, values: npt.NDArray[Any], origin: int, now: int) -> Dues:
    """Times after ``origin``, rounded up to microseconds."""
    unit, multiple = np.datetime_data(values.dtype)
    # A rough check first: a time that is far too late would overflow in the conversion to microseconds.
    rough = values.astype(np.int64) * (multiple * _NUMPY_UNITS[unit]) + (origin - now) / 1_000_000
    _check(name, rough, 2 * DELAY_SECONDS_MAX, 0.0)
    whole = values.astype("timedelta64[us]")
    dues: npt.NDArray[np.int64] = whole.astype(np.int64) + (whole < values) + origin
    _check(name, (dues - now) / 1_000_000, DELAY_SECONDS_MAX, DELAY_SECONDS_MIN)
    return dues


def _check(name: str, ahead: npt.NDArray[Any], most: float, least: float) -> None:
    """Refuse due times that are more than ``most`` seconds ahead, and delays below ``least``."""
    bad = ahead > most
    if name == "delay":
        bad |= ahead < least
    rows = np.flatnonzero(bad)
    if len(rows):
        raise InvalidArgument(f"row {rows[0]}: {name} is {ahead[rows[0]]:g} s from now; {_LIMITS}")
