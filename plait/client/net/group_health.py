"""Measures how fast broker groups answer. Rows that may go to any partition avoid slow or failing groups for a while.

Pure: the time is passed in. The answer time of a group is smoothed, so one slow answer changes little, and a slow
broker is detected after a few answers. The slower a group, the longer it is avoided. After that time the group gets its
share of rows again, and the measurement starts again.
"""

from __future__ import annotations

from typing import Final

#: The weight of the newest answer in the smoothed time.
SMOOTHING: Final = 0.25
#: (minimum smoothed answer time in seconds, seconds for which the group is avoided); the last matching pair applies.
SLOW: Final = ((0.5, 2.0), (1.0, 5.0), (3.0, 15.0), (15.0, 60.0))
#: A failed send counts as an answer after this time.
FAILURE_SECONDS: Final = 3.0


class _GroupRecord:
    __slots__ = ("avoided_until", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.avoided_until = 0.0


class GroupHealth:
    """The answer time of each broker group, and until when it is avoided."""

    def __init__(self) -> None:
        self._groups: dict[str, _GroupRecord] = {}
        #: Grows when the set of usable groups changes, except when the time of an avoided group ends.
        self.changes = 0

    def answered(self, group: str, seconds: float, now: float) -> None:
        """Record that a send was answered after ``seconds``."""
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = _GroupRecord()
            known.seconds = seconds
        elif known.avoided_until and known.avoided_until <= now:
            # The group was avoided for a while, so its earlier answer time is no longer used.
            known.seconds, known.avoided_until = seconds, 0.0
        else:
            known.seconds += SMOOTHING * (seconds - known.seconds)
        if known.seconds >= SLOW[0][0]:
            self._avoid(known, now)
        elif known.avoided_until:
            # The group is fast again before its time is over.
            known.avoided_until = 0.0
            self.changes += 1

    def failed(self, group: str, now: float) -> None:
        """Record that a send was refused, or that the broker could not be reached."""
        known = self._groups.setdefault(group, _GroupRecord())
        known.seconds = max(known.seconds, FAILURE_SECONDS)
        self._avoid(known, now)

    def _avoid(self, known: _GroupRecord, now: float) -> None:
        pause = [seconds for limit, seconds in SLOW if known.seconds >= limit][-1]
        known.avoided_until = max(known.avoided_until, now + pause)
        self.changes += 1

    def changed(self) -> None:
        """Record that the connected brokers or the route have changed."""
        self.changes += 1

    def avoided_until(self, group: str) -> float:
        """Until when rows that may go to any partition avoid the group."""
        known = self._groups.get(group)
        return known.avoided_until if known is not None else 0.0

    def seconds(self, group: str) -> float:
        """The smoothed answer time."""
        known = self._groups.get(group)
        return known.seconds if known is not None else 0.0
