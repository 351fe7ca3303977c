"""Events of the action log as one array, in log order, independent of the input."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from plait.storage.logs.action_events import EVENT, OF_ROWS

#: The fields of ``EVENT``. ``time`` is when the event happened.
#: ``offset`` is the offset of its frame: events of one frame happened together. ``place`` ascends from event to event.
AUDITED: Final = np.dtype(
    [
        ("action", "u1"),
        ("flag", "?"),
        ("attempt", "<u2"),
        ("group", "<u4"),
        ("holder", "<u4"),
        ("epoch", "<u4"),
        ("start", "<i8"),
        ("end", "<i8"),
        ("time", "<i8"),
        ("value", "<i8"),
        ("offset", "<i8"),
        ("place", "<i8"),
    ]
)
Events = npt.NDArray[Any]

_IS_OF_ROWS: Final = np.isin(np.arange(256), list(OF_ROWS))
NONE: Final[Events] = np.empty(0, AUDITED)


def audited(frames: Iterable[tuple[int, int, npt.NDArray[Any]]]) -> Events:
    """(log offset, time written, events) of frames as one array."""
    members = list(frames)
    if not members:
        return NONE
    # Joined as bytes: many small arrays of records cost numpy more than all the rest.
    raw = np.frombuffer(b"".join([events.tobytes() for _, _, events in members]), EVENT)
    counts = np.array([len(events) for _, _, events in members])
    found = np.empty(len(raw), AUDITED)
    for name in EVENT.names or ():
        found[name] = raw[name]
    found["time"] = np.repeat(np.array([time for _, time, _ in members], np.int64), counts)
    found["offset"] = np.repeat(np.array([offset for offset, _, _ in members], np.int64), counts)
    # A frame has more bytes than events, so that no two events have the same place.
    found["place"] = found["offset"] + np.arange(len(raw)) - np.repeat(np.cumsum(counts) - counts, counts)
    return found


def of_rows(events: Events) -> Events:
    """The events about rows."""
    chosen: Events = events[_IS_OF_ROWS[events["action"]] & (events["start"] < events["end"])]
    return chosen


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of [start, end) ranges, as few as possible and ascending."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif start < end:
            joined.append((start, end))
    return joined


def without(ranges: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of [start, end) ranges that are in none of the others."""
    left: list[tuple[int, int]] = []
    taken = merged(others)
    for start, end in ranges:
        for first, last in taken:
            if first < end and last > start:
                if start < first:
                    left.append((start, first))
                start = last
        if start < end:
            left.append((start, end))
    return left


def spans_of(events: Events) -> dict[int, tuple[int, int]]:
    """Group → the range [low, high) of the sequences that its events name."""
    named = of_rows(events)
    numbers, which = np.unique(named["group"], return_inverse=True)
    low = np.full(len(numbers), np.iinfo(np.int64).max)
    high = np.zeros(len(numbers), np.int64)
    np.minimum.at(low, which, named["start"])
    np.maximum.at(high, which, named["end"])
    return {int(n): (int(a), int(b)) for n, a, b in zip(numbers, low, high, strict=True)}
