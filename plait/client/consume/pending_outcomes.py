"""What is to be said to a broker and was not yet: which ranges are done, and which failed in which way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, Self

from plait.client.consume.delivered import DeliveredFrame
from plait.client.consume.failure import EpochRange, FailureOutcome, Nacks
from plait.wire import messages as m


class PendingOutcomes(Protocol):
    """Words on rows, as they leave for the broker."""

    def collect(self, frames: Iterable[DeliveredFrame]) -> None:
        """Take what was said of the rows of frames."""

    def add(self, acks: list[EpochRange], nacks: Nacks) -> None:
        """Take what was said in an earlier process."""

    def __bool__(self) -> bool:
        """There is something to be said."""

    def clear(self) -> None:
        """Nothing of it is to be said any more."""

    def take(self) -> Self:
        """All of it, to be said now."""

    def give_back(self, unsaid: Self) -> None:
        """It could not be said: it goes before what came meanwhile."""

    def plain(self) -> tuple[list[EpochRange], Nacks]:
        """All of it as ranges of sequences, whatever the session."""

    def new_session(self) -> None:
        """What was said so far is of rows that an earlier session brought."""

    def ack(self, session: int) -> m.AckRequest | None:
        """What is done; None: nothing is."""

    def failures(self) -> list[FailureOutcome]:
        """The ways in which rows failed."""

    def nack(self, session: int, failed: FailureOutcome) -> m.NackRequest:
        """What failed in one way."""

    def told(self, failed: FailureOutcome) -> None:
        """The broker has that."""


class SharedPending:
    """The words of a member that shares: ranges mean just what they say."""

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

    def clear(self) -> None:
        self._acks, self._nacks = [], {}

    def take(self) -> SharedPending:
        taken = SharedPending()
        taken._acks, taken._nacks = merged(self._acks), self._nacks
        self.clear()
        return taken

    def give_back(self, unsaid: SharedPending) -> None:
        self._acks = unsaid._acks + self._acks
        self.add([], unsaid._nacks)

    def plain(self) -> tuple[list[EpochRange], Nacks]:
        return self._acks, self._nacks

    def new_session(self) -> None:
        """Nothing changes."""

    def ack(self, session: int) -> m.AckRequest | None:
        return m.AckRequest(session, self._acks) if self._acks else None

    def failures(self) -> list[FailureOutcome]:
        return list(self._nacks)

    def nack(self, session: int, failed: FailureOutcome) -> m.NackRequest:
        return m.NackRequest(session, merged(self._nacks[failed]), *failed)

    def told(self, failed: FailureOutcome) -> None:
        del self._nacks[failed]


def merged(ranges: list[EpochRange]) -> list[EpochRange]:
    """Neighbouring ranges of one epoch joined."""
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
