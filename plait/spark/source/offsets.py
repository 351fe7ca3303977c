"""Where reading starts and ends in each partition, and whether what lies between is still what it was.

An offset is a sequence, the epoch that stored the message before it and the partition's number. A broker that lost the
tail of its log gives the same sequences to other messages, under a later epoch; a subject that was deleted and made
anew has another number. So an offset that leads to other messages than it did is known for what it is (R3).

A place may have several *lives* of a partition, one span for each, the oldest first: an archive keeps what it had
before its subject was deleted and made anew. All of the first comes before the second, and so on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from plait.client.arguments import start_of
from plait.client.read.surveyor import PartitionSpan
from plait.errors import DataLost, InvalidArgument
from plait.frame.header import SEQUENCE_MAX
from plait.frame.view import FrameView
from plait.storage.reading.log_chunks import WantedRows

log = logging.getLogger("plait.spark")

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
TIME: Final = "time"
EACH: Final = "each"

#: An offset of one partition as Spark keeps it; the order of the names is that of their texts.
OffsetJson = dict[str, int]
_FIELDS: Final = frozenset(("epoch", "from", "id", "sealed", "sequence"))


@dataclass(frozen=True)
class PartitionOffset:
    """A place between two messages of a partition: reading starts with ``sequence``, or ends before it."""

    sequence: int
    #: Of the message before it; None: whatever it is, 0: there is none.
    epoch: int | None = None
    #: The partition's number; None: whatever it is.
    number: int | None = None
    #: Where a batch that ends here begins, if the offset that it starts from does not say: that one does not know the
    #: partition, or is the query's first, which Spark does not keep.
    since: int | None = None
    #: No message follows: the partition takes no more. Should it be gone one day, nothing of it is lost.
    sealed: bool = False

    @classmethod
    def of(cls, span: PartitionSpan, sequence: int) -> PartitionOffset:
        """The place as it is now."""
        return cls(sequence, span.epoch_at(sequence - 1) if sequence > span.start else 0, span.number)

    def to_json(self) -> OffsetJson:
        """Sorted by name."""
        found = {
            "epoch": self.epoch,
            "from": self.since,
            "id": self.number,
            "sealed": 1 if self.sealed else None,
            "sequence": self.sequence,
        }
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def from_json(cls, place: str, given: Any) -> PartitionOffset:
        """A sequence, or one with its epoch and the partition's number."""
        fields = {"sequence": given} if isinstance(given, int) else given
        if not isinstance(fields, dict) or "sequence" not in fields or fields.keys() - _FIELDS:
            raise InvalidArgument(
                f"offset {given!r} of {place!r} is not understood; use a sequence or "
                '{"sequence": 5, "epoch": 2}, or "earliest" or "latest"'
            )
        for name, value in fields.items():
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= SEQUENCE_MAX:
                raise InvalidArgument(f"{name} {value!r} of {place!r} is not a number of 0 or more")
        sealed = bool(fields.get("sealed"))
        return cls(fields["sequence"], fields.get("epoch"), fields.get("id"), fields.get("from"), sealed)


@dataclass(frozen=True)
class Bound:
    """Where all partitions start, or end."""

    kind: str
    #: Microseconds, of a time.
    time: int = 0
    #: Of each partition that is named; others are as usual.
    each: Mapping[str, PartitionOffset | str] = field(default_factory=dict)

    def resolve(self, lives: Sequence[PartitionSpan], usual: str, time_index: int) -> PartitionOffset:
        """The place in a partition; ``time_index`` is that of the bound's time among the spans'."""
        if self.kind == TIME:
            span = next((span for span in lives if span.at[time_index] < span.end), lives[-1])
            return PartitionOffset.of(span, span.at[time_index])
        place: PartitionOffset | str = self.each.get(str(lives[0].place), usual) if self.kind == EACH else self.kind
        if isinstance(place, PartitionOffset):
            return place
        return (
            PartitionOffset.of(lives[0], lives[0].start)
            if place == EARLIEST
            else PartitionOffset.of(lives[-1], lives[-1].end)
        )

    def check_names(self, option: str, spans: Iterable[PartitionSpan], wanted: WantedRows) -> None:
        """Every partition that is named is there, unless a filter leaves nothing of it: then nobody has looked."""
        known = sorted({str(span.place) for span in spans})
        unknown = sorted(place for place in self.each.keys() - set(known) if _is_kept(place, wanted))
        if unknown:
            raise InvalidArgument(
                f"{option} names {', '.join(unknown)}; the subject's partitions are {', '.join(known) or 'none'}"
            )


def _is_kept(place: str, wanted: WantedRows) -> bool:
    name = place.rpartition("@")[0]
    return wanted.keeps(name.partition("#")[0], name)


def parse_bound(option: str, text: str, now: int) -> Bound:
    """``earliest``, ``latest``, JSON with an offset for each partition, a time, or "-5m" before ``now``."""
    given = text.strip()
    if given.lower() in (EARLIEST, LATEST):
        return Bound(given.lower())
    if given.startswith("{"):
        return Bound(EACH, each=_parse_each(option, given))
    try:
        start = start_of(given, now)
    except InvalidArgument:
        start = None
    if start is None or isinstance(start, str) or start[0] != "time":
        raise InvalidArgument(
            f"{option} {given!r} is not understood; use earliest, latest, a time as 2024-05-01T12:00:00Z or -5m, or "
            'JSON as {"order.book@g1": 5}'
        )
    return Bound(TIME, time=start[1])


def _parse_each(option: str, given: str) -> dict[str, PartitionOffset | str]:
    try:
        decoded = json.loads(given)
    except ValueError as error:
        raise InvalidArgument(f"{option} {given!r} is not JSON: {error}") from None
    found: dict[str, PartitionOffset | str] = {}
    for place, value in decoded.items():
        if "@" not in place:
            raise InvalidArgument(f"{option} names {place!r}; a partition is named as in 'order.book@g1'")
        found[place] = value if value in (EARLIEST, LATEST) else PartitionOffset.from_json(place, value)
    return found


def lives_of(spans: Iterable[PartitionSpan]) -> dict[str, list[PartitionSpan]]:
    """Partition → its lives, the oldest first."""
    found: dict[str, list[PartitionSpan]] = {}
    for span in spans:
        found.setdefault(str(span.place), []).append(span)
    return found


def life_at(lives: Sequence[PartitionSpan], position: PartitionOffset) -> int:
    """Which life a place is in: the newest one where it does not say, or names one that is not there."""
    return next((index for index, span in enumerate(lives) if span.number == position.number), len(lives) - 1)


# --- what was lost ------------------------------------------------------------------------------


def check_start(span: PartitionSpan, start: PartitionOffset) -> tuple[int, str | None]:
    """Where reading goes on from, and what was lost before that; None: nothing."""
    place = span.place
    if start.number is not None and start.number != span.number:
        return span.start, f"{place} was deleted and made anew: what it had from sequence {start.sequence} on is gone"
    rewritten = _rewritten(span, start)
    if rewritten is not None:
        return rewritten
    if start.sequence < span.start:
        last = min(span.start, span.end) - 1
        return span.start, f"{place} starts at {span.start}: sequences {start.sequence} to {last} are expired"
    if start.sequence > span.end:
        return span.end, f"{place} ends at {span.end}: sequences {span.end} to {start.sequence - 1} are lost"
    return start.sequence, None


def _rewritten(span: PartitionSpan, start: PartitionOffset) -> tuple[int, str] | None:
    """Messages that were read before are lost, and others have their sequences."""
    before = start.sequence - 1
    if not start.epoch or before < span.start:
        return None
    if before >= span.end:
        again = max(min(span.first_after(start.epoch), span.end), span.start)
        return again, (
            f"{span.place} ends at {span.end}: sequences {span.end} to {before} of epoch {start.epoch} are lost"
        )
    epoch = span.epoch_at(before)
    if epoch in (0, start.epoch):
        return None
    again = max(min(span.first_after(start.epoch), span.end), span.start)
    return again, (
        f"{span.place} has other messages from sequence {again} on: those up to {before} were read in epoch "
        f"{start.epoch}, which lost them, and epoch {epoch} has given their sequences to others"
    )


def check_end(span: PartitionSpan, end: PartitionOffset) -> tuple[int, str | None]:
    """Where reading ends, and what is missing before that; None: nothing.

    It ends where ``check_start`` goes on from the same place: what has taken the place of lost messages is read once.
    """
    place = span.place
    if end.number is not None and end.number != span.number:
        return span.start, f"{place} was deleted and made anew: what it had up to sequence {end.sequence} is gone"
    again = max(min(span.first_after(end.epoch), span.end), span.start) if end.epoch else span.end
    if end.sequence > span.end:
        return again, f"{place} ends at {span.end}: sequences {span.end} to {end.sequence - 1} are not there"
    last = end.sequence - 1
    if end.epoch and last >= span.start and span.epoch_at(last) not in (0, end.epoch):
        return min(again, end.sequence), (
            f"{place} has other messages up to sequence {last}: those of epoch {end.epoch} are lost, and epoch "
            f"{span.epoch_at(last)} has given their sequences to others"
        )
    return end.sequence, None


def check_epoch(span: PartitionSpan, frame: FrameView) -> None:
    """``DataLost`` where a frame is another than when the query was planned: its log lost a tail meanwhile."""
    epoch = span.epoch_at(frame.base)
    if epoch not in (0, frame.epoch):
        raise DataLost(
            f"{span.place} has other messages from sequence {frame.base} on than when the query was planned: those of "
            f"epoch {epoch} are lost, and epoch {frame.epoch} has given their sequences to others"
        )


def report(losses: Sequence[str], *, fail: bool) -> None:
    """Fail with what was lost, or warn of it."""
    if not losses:
        return
    if fail:
        raise DataLost(
            f"messages are lost: {'; '.join(losses)}. Go on without them with the option failOnDataLoss=false, or "
            "start anew from other startingOffsets"
        )
    for loss in losses:
        log.warning("messages are lost: %s", loss)
