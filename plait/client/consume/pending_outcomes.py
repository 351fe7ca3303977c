"""Outcomes that are collected and not yet sent to the broker: acked ranges, and failed ranges by failure outcome."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, Self

from plait.client.consume.delivered import DeliveredFrame
from plait.client.consume.failure import EpochRange, FailureOutcome, Nacks
from plait.wire import messages as m


class PendingOutcomes(Protocol):
    """The pending outcomes of one partition."""

    def collect(self, frames: Iterable[DeliveredFrame]) -> None:
        """Add the outcomes of the frames' rows."""

    def add(self, acks: list[EpochRange], nacks: Nacks) -> None:
        """Add outcomes from the spool of an earlier process."""

    def __bool__(self) -> bool:
        """There are pending outcomes."""

    def only_acks(self, ranges_max: int) -> bool:
        """All outcomes are acks, in at most ``ranges_max`` ranges."""

    def clear(self) -> None:
        """Discard all outcomes."""

    def take(self) -> Self:
        """Remove and return all outcomes, for sending."""

    def give_back(self, unsent: Self) -> None:
        """Put back outcomes that could not be sent, before those that were added meanwhile."""

    def plain(self) -> tuple[list[EpochRange], Nacks]:
        """All outcomes as sequence ranges, which are valid in every session."""

    def new_session(self) -> None:
        """A new session starts: the pending outcomes belong to rows delivered in an earlier one."""

    def ack(self, session: int) -> m.AckRequest | None:
        """The request for the acked ranges; None: there are none."""

    def failures(self) -> list[FailureOutcome]:
        """The distinct failure outcomes."""

    def nack(self, session: int, failed: FailureOutcome) -> m.NackRequest:
        """The request for the ranges with one failure outcome."""

    def confirm(self, failed: FailureOutcome) -> None:
        """Remove the ranges with one failure outcome: the broker has stored them."""


class SharedPending:
    """Pending outcomes of a shared consumer: plain sequence ranges."""

    def __init__(self) -> None:
        self._acks: list[EpochRange] = []
        self._nacks: Nacks = {}

    def collect(self, frames: Iterable[DeliveredFrame]) -> None:
        for delivered in frames:
            self.add(*delivered.collect())

    def add(self, acks: list[EpochRange], nacks: Nacks) -> None:
        self._acks += acks
        for failed, ranges in nacks.items():
            if ranges:
                self._nacks.setdefault(failed, []).extend(ranges)

    def __bool__(self) -> bool:
        return bool(self._acks or self._nacks)

    def only_acks(self, ranges_max: int) -> bool:
        return not self._nacks and len(self._acks) <= ranges_max

    def clear(self) -> None:
        self._acks, self._nacks = [], {}

    def take(self) -> SharedPending:
        taken = SharedPending()
        taken._acks, self._acks = merged(self._acks), []
        taken._nacks, self._nacks = self._nacks, {}
        return taken

    def give_back(self, unsent: SharedPending) -> None:
        self._acks = unsent._acks + self._acks
        self.add([], unsent._nacks)

    def plain(self) -> tuple[list[EpochRange], Nacks]:
        return self._acks, self._nacks

    def new_session(self) -> None:
        """No effect: sequence ranges are valid in every session."""

    def ack(self, session: int) -> m.AckRequest | None:
        return m.AckRequest(session, self._acks) if self._acks else None

    def failures(self) -> list[FailureOutcome]:
        return list(self._nacks)

    def nack(self, session: int, failed: FailureOutcome) -> m.NackRequest:
        return m.NackRequest(session, merged(self._nacks[failed]), *failed)

    def confirm(self, failed: FailureOutcome) -> None:
        del self._nacks[failed]


def merged(ranges: list[EpochRange]) -> list[EpochRange]:
    """The ranges sorted, with overlapping and adjacent ranges of one epoch joined."""
    if len(ranges) < 2:
        return ranges
    ranges.sort()
    joined = [ranges[0]]
    for start, end, epoch in ranges[1:]:
        last_start, last_end, last_epoch = joined[-1]
        if start <= last_end and epoch == last_epoch:
            joined[-1] = (last_start, max(end, last_end), epoch)
        else:
            joined.append((start, end, epoch))
    return joined
