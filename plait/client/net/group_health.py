"""Which broker groups answer well: those that are slow or fail are avoided for a while, by rows that may go anywhere.

Pure: the time is passed in. A group's answer time is smoothed, so that one slow answer means little and a slow broker
is noticed within a few. The worse it is, the longer it is left alone; then it gets its share again, and shows
whether it is better.
"""

from __future__ import annotations

from typing import Final

#: The weight of the newest answer in the smoothed time.
SMOOTHING: Final = 0.25
#: (smoothed answer time from which on, seconds that the group is avoided): the last that applies counts.
SLOW: Final = ((0.5, 2.0), (1.0, 5.0), (3.0, 15.0), (15.0, 60.0))
#: A failed send counts as an answer after this.
FAILURE_SECONDS: Final = 3.0


class _GroupRecord:
    __slots__ = ("avoided_until", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.avoided_until = 0.0


class GroupHealth:
    """What is known of each broker group."""

    def __init__(self) -> None:
        self._groups: dict[str, _GroupRecord] = {}
        #: Grows with every change of who can be sent to; the end of a time is none.
        self.changes = 0

    def answered(self, group: str, seconds: float, now: float) -> None:
        """A send was answered after so long."""
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = _GroupRecord()
            known.seconds = seconds
        elif known.avoided_until and known.avoided_until <= now:
            # Left alone for a while: what it was before does not count any more.
            known.seconds, known.avoided_until = seconds, 0.0
        else:
            known.seconds += SMOOTHING * (seconds - known.seconds)
        if known.seconds >= SLOW[0][0]:
            self._avoid(known, now)
        elif known.avoided_until:
            # It is well again before its time.
            known.avoided_until = 0.0
            self.changes += 1

    def failed(self, group: str, now: float) -> None:
        """A send was refused, or the broker is not reached."""
        known = self._groups.setdefault(group, _GroupRecord())
        known.seconds = max(known.seconds, FAILURE_SECONDS)
        self._avoid(known, now)

    def _avoid(self, known: _GroupRecord, now: float) -> None:
        pause = [seconds for limit, seconds in SLOW if known.seconds >= limit][-1]
        known.avoided_until = max(known.avoided_until, now + pause)
        self.changes += 1

    def news(self) -> None:
        """Something else has changed: who is connected, or what the route says."""
        self.changes += 1

    def avoided_until(self, group: str) -> float:
        """Rows that may go anywhere do not go there before then."""
        known = self._groups.get(group)
        return known.avoided_until if known is not None else 0.0

    def seconds(self, group: str) -> float:
        """The smoothed answer time."""
        known = self._groups.get(group)
        return known.seconds if known is not None else 0.0
