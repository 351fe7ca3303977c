"""The rows of a block, and the events about them in log order, as arrays; independent of the input."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from plait.model.logical_partitions import NO_KEY_HASH, Hashes, Lps, lp_set, lps_of
from plait.storage.logs.action_events import EVENT, OF_ROWS

Numbers = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class BlockRows:
    """Messages of one partition, by ascending sequence; one array per column."""

    sequences: Numbers
    epochs: Numbers
    #: The LP of each row, also of rows without a key.
    lps: Lps
    #: ``NO_KEY_HASH``: the row has no key.
    hashes: Hashes
    store_times: Numbers
    #: The send time, or the store time where the producer gave none.
    send_times: Numbers
    #: Producer id and producer sequence of each row: its message id.
    ids: tuple[UInt64s, UInt64s]
    #: True for rows that were delayed or sent one-way: their order may differ from the order of sending.
    unordered: Flags
    #: True for rows of LPs that the partition did not accept at that time (``stored_order.astray``).
    astray: Flags
    #: The place of each row in the message log, comparable between partitions of one data directory. None: not known.
    places: Numbers | None = None
    #: How often the set of LPs that the partition accepts had changed when the row was stored. None: it never changed.
    spans: Numbers | None = None

    def __len__(self) -> int:
        return len(self.sequences)


def slots_of(sequences: Numbers, hashes: Hashes, taken: Sequence[tuple[int, list[tuple[int, int]]]]) -> Lps:
    """The LP of each row. A row without a key has one of the LPs that were ``taken`` when it was stored."""
    lps = lps_of(sequences, hashes)
    keyless = hashes == NO_KEY_HASH
    if taken and keyless.any():
        since = np.searchsorted([start for start, _ in taken], sequences, "right") - 1
        for index in np.unique(since[keyless]).tolist():
            slots = np.flatnonzero(lp_set(taken[max(index, 0)][1]))
            mine = keyless & (since == index)
            lps[mine] = slots[lps[mine] % len(slots)]
    return lps


def begins_of(*columns: npt.NDArray[Any]) -> Flags:
    """True for each row that differs from the row before it in one of the columns."""
    begins = np.ones(len(columns[0]), bool)
    begins[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return begins


# --- events -------------------------------------------------------------------------------------

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
