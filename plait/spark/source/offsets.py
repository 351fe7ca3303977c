"""Offsets: where reading starts and ends in each partition, and whether the messages between are unchanged.

An offset is a sequence, the epoch of the message before it and the partition's number. A broker that lost the tail of
its log gives the same sequences to other messages in a later epoch; the partitions of a subject that was deleted and
created again have other numbers. An offset that points to other messages than before is therefore detected (R3).

An input may have several *lives* of a partition, one span for each, the oldest first: an archive keeps the messages
from before the deletion of a subject. All messages of a life come before those of the next one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec

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

_Number = Annotated[int, msgspec.Meta(ge=0, le=SEQUENCE_MAX)]


class PartitionOffset(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    rename={"number": "id", "since": "from"},
):
    """A position between two messages of a partition: reading starts with ``sequence``, or ends before it."""

    sequence: _Number
    #: The epoch of the message before it; None: any epoch, 0: there is no message before it.
    epoch: _Number | None = None
    #: The partition's number; None: any number.
    number: _Number | None = None
    #: Where a batch that ends here begins. Set if the starting offset of the batch does not say, because it lacks the
    #: partition, or is the first offset of the query, which Spark does not store.
    since: _Number | None = None
    #: 1 if no message follows, because the partition is sealed. If the partition is removed later, nothing is lost.
    sealed: _Number = 0

    @classmethod
    def of(cls, span: PartitionSpan, sequence: int) -> PartitionOffset:
        """The position of a sequence in a span."""
        return cls(sequence, span.epoch_at(sequence - 1) if sequence > span.start else 0, span.number)

    def to_json(self) -> dict[str, int]:
        """The fields that are set, sorted by name."""
        fields: dict[str, int] = msgspec.to_builtins(self, order="sorted")
        return fields

    @classmethod
    def from_json(cls, partition: str, given: Any) -> PartitionOffset:
        """Parse a sequence, or an object with a sequence and perhaps its epoch and the partition's number."""
        try:
            return msgspec.convert({"sequence": given} if isinstance(given, int) else given, cls)
        except msgspec.ValidationError as error:
            raise InvalidArgument(
                f"invalid offset {given!r} of {partition!r} ({error}); use a sequence or "
                '{"sequence": 5, "epoch": 2}, or "earliest" or "latest"'
            ) from None


@dataclass(frozen=True)
class Bound:
    """Where reading starts, or ends, in all partitions."""

    kind: str
    #: Microseconds since 1970, if the bound is a time.
    time: int = 0
    #: Partition → its offset; partitions that are not named have the default.
    each: Mapping[str, PartitionOffset | str] = field(default_factory=dict)

    def resolve(self, lives: Sequence[PartitionSpan], default: str, time_index: int) -> PartitionOffset:
        """The position in a partition; ``time_index`` is the index of the bound's time in the spans."""
        if self.kind == TIME:
            span = next((span for span in lives if span.at[time_index] < span.end), lives[-1])
            return PartitionOffset.of(span, span.at[time_index])
        offset: PartitionOffset | str = self.each.get(str(lives[0].place), default) if self.kind == EACH else self.kind
        if isinstance(offset, PartitionOffset):
            return offset
        return (
            PartitionOffset.of(lives[0], lives[0].start)
            if offset == EARLIEST
            else PartitionOffset.of(lives[-1], lives[-1].end)
        )

    def check_names(self, option: str, spans: Iterable[PartitionSpan], wanted: WantedRows) -> None:
        """Check that every named partition exists, except partitions that a filter excludes: those were not listed."""
        known = sorted({str(span.place) for span in spans})
        unwanted = []
        for partition in self.each:
            name = partition.rpartition("@")[0]
            if not wanted.keeps(name.partition("#")[0], name):
                unwanted.append(partition)
        unknown = sorted(self.each.keys() - {*known, *unwanted})
        if unknown:
            raise InvalidArgument(
                f"{option} names unknown partitions {', '.join(unknown)}; the partitions of the subject are "
                f"{', '.join(known) or 'none'}"
            )


def parse_bound(option: str, text: str, now: int) -> Bound:
    """Parse ``earliest``, ``latest``, JSON with an offset for each partition, a time, or "-5m" before ``now``."""
    given = text.strip()
    if given.lower() in (EARLIEST, LATEST):
        return Bound(given.lower())
    if given.startswith("{"):
        try:
            decoded = json.loads(given)
        except ValueError as error:
            raise InvalidArgument(f"{option} {given!r} is not JSON: {error}") from None
        each: dict[str, PartitionOffset | str] = {}
        for partition, value in decoded.items():
            if "@" not in partition:
                hint = "give the name of a partition, as in 'order.book@g1'"
                raise InvalidArgument(f"{option} names {partition!r}; {hint}")
            each[partition] = value if value in (EARLIEST, LATEST) else PartitionOffset.from_json(partition, value)
        return Bound(EACH, each=each)
    try:
        start = start_of(given, now)
    except InvalidArgument:
        start = None
    if start is None or isinstance(start, str) or start[0] != "time":
        raise InvalidArgument(
            f"invalid {option} {given!r}; use earliest, latest, a time such as 2024-05-01T12:00:00Z or -5m, or JSON "
            'such as {"order.book@g1": 5}'
        )
    return Bound(TIME, time=start[1])


def lives_of(spans: Iterable[PartitionSpan]) -> dict[str, list[PartitionSpan]]:
    """Partition → its lives, the oldest first."""
    found: dict[str, list[PartitionSpan]] = {}
    for span in spans:
        found.setdefault(str(span.place), []).append(span)
    return found


def life_at(lives: Sequence[PartitionSpan], position: PartitionOffset) -> int:
    """The index of the life that a position is in: the newest life if the position names none, or one that is gone."""
    return next((index for index, span in enumerate(lives) if span.number == position.number), len(lives) - 1)


# --- lost messages ------------------------------------------------------------------------------


def check_start(span: PartitionSpan, start: PartitionOffset) -> tuple[int, str | None]:
    """Where reading resumes, and a description of the messages that are lost before it; None: none are."""
    partition = span.place
    if start.number is not None and start.number != span.number:
        return (
            span.start,
            f"{partition} was deleted and created again: its old messages from sequence {start.sequence} on are gone",
        )
    before = start.sequence - 1
    if start.epoch and before >= span.start:
        again = _first_after(span, start.epoch)
        if before >= span.end:
            return again, (
                f"{partition} ends at {span.end}: sequences {span.end} to {before} of epoch {start.epoch} are lost"
            )
        if (epoch := span.epoch_at(before)) not in (0, start.epoch):
            return again, (
                f"{partition} has other messages from sequence {again} on: those up to {before} were read in epoch "
                f"{start.epoch} and are lost, and epoch {epoch} has given their sequences to others"
            )
    if start.sequence < span.start:
        last = min(span.start, span.end) - 1
        return span.start, f"{partition} starts at {span.start}: sequences {start.sequence} to {last} are expired"
    if start.sequence > span.end:
        return span.end, f"{partition} ends at {span.end}: sequences {span.end} to {start.sequence - 1} are lost"
    return start.sequence, None


def _first_after(span: PartitionSpan, epoch: int) -> int:
    """The first existing sequence of a later epoch."""
    return max(min(span.first_after(epoch), span.end), span.start)


def check_end(span: PartitionSpan, end: PartitionOffset) -> tuple[int, str | None]:
    """Where reading ends, and a description of the messages that are missing before it; None: none are.

    It ends where ``check_start`` resumes from the same offset, so that messages that replaced lost ones are read once.
    """
    partition = span.place
    if end.number is not None and end.number != span.number:
        return (
            span.start,
            f"{partition} was deleted and created again: its old messages up to sequence {end.sequence} are gone",
        )
    again = _first_after(span, end.epoch) if end.epoch else span.end
    if end.sequence > span.end:
        return again, f"{partition} ends at {span.end}: sequences {span.end} to {end.sequence - 1} are missing"
    last = end.sequence - 1
    if end.epoch and last >= span.start and span.epoch_at(last) not in (0, end.epoch):
        return min(again, end.sequence), (
            f"{partition} has other messages up to sequence {last}: those of epoch {end.epoch} are lost, and epoch "
            f"{span.epoch_at(last)} has given their sequences to others"
        )
    return end.sequence, None


def check_epoch(span: PartitionSpan, frame: FrameView) -> None:
    """Raise ``DataLost`` if a frame has changed since the query was planned: its log lost its tail meanwhile."""
    epoch = span.epoch_at(frame.base)
    if epoch not in (0, frame.epoch):
        raise DataLost(
            f"{span.place} has other messages from sequence {frame.base} on than when the query was planned: those of "
            f"epoch {epoch} are lost, and epoch {frame.epoch} has given their sequences to others"
        )


def report(losses: Sequence[str], *, fail: bool) -> None:
    """Raise ``DataLost`` for lost messages, or log a warning."""
    if not losses:
        return
    if fail:
        raise DataLost(
            f"messages are lost: {'; '.join(losses)}. Continue without them with the option failOnDataLoss=false, or "
            "start a new query from other startingOffsets"
        )
    for loss in losses:
        log.warning("messages are lost: %s", loss)
