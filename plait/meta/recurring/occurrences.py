"""The times of a recurrence: by a cron expression in a time zone, or by an interval.

The rule for changes of the clock (daylight saving time), as in Debian's cron:

- An expression whose minute and hour both name times (neither begins with ``*``) fires at each of these wall times
  once. A time that the clock skips fires at the end of the gap, and once if several such times are skipped. A time that
  the clock repeats fires at its first occurrence.
- Any other expression fires in each real minute whose wall time matches: not in a gap, and again when the clock repeats
  an hour.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from plait.errors import InvalidArgument
from plait.limits import CRON_LENGTH_MAX

#: No further time: after every time that a column can have.
NEVER: Final = 1 << 62

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FIELDS: Final = "minute hour day-of-month month day-of-week"
#: No time after the year 9900: datetime ends with the year 9999.
_LAST_MOMENT: Final = int(datetime(9900, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000
_ZERO: Final = timedelta(0)
_SECOND: Final = timedelta(seconds=1)
#: Zones change their offset less often than this.
_STEP: Final = timedelta(days=14)
#: The longest gap: a zone that crosses the date line skips a day.
_GAP_MAX: Final = timedelta(days=1)


class Rule:
    """When a recurrence fires: by ``cron`` in ``zone``, or every ``every`` microseconds counted from ``start``.

    Times are microseconds since 1970. A rule is checked when it is made.
    """

    def __init__(self, cron: str | None, zone: str, every: int | None, start: int) -> None:
        self._cron = cron or ""
        self._every = every
        self._start = start
        self._zone = UTC if cron is None else _zone(zone)
        if cron is not None:
            _check(cron)
        #: True if the minute and the hour name times, which then fire once each.
        self._fixed = not any(field.startswith("*") for field in self._cron.split()[:2])

    def after(self, moment: int) -> int:
        """The first time after ``moment``; ``NEVER`` if there is none."""
        if self._every is not None:
            return self._start + max((moment - self._start) // self._every + 1, 1) * self._every
        # A firing is at a whole minute, so the second that has begun is enough.
        if moment > _LAST_MOMENT:
            return NEVER
        begin = _EPOCH + timedelta(seconds=moment // 1_000_000)
        found = self._fixed_after(begin) if self._fixed else self._minute_after(begin)
        return NEVER if found is None else (found - _EPOCH) // timedelta(microseconds=1)

    def _fixed_after(self, begin: datetime) -> datetime | None:
        """The first occurrence, after ``begin``, of a wall time that matches; a skipped one is at the gap's end."""
        for wall in CronSim(self._cron, begin.astimezone(self._zone).replace(tzinfo=None, fold=0)):
            # In a gap, fold=0 has the offset before the gap: the instant is as long after the gap as the wall time is
            # after the gap's start.
            found = wall.replace(tzinfo=self._zone).astimezone(UTC)
            if found.astimezone(self._zone).replace(tzinfo=None) != wall:
                found = self._change(found - _GAP_MAX, found)
            if found > begin:
                return found
        return None

    def _minute_after(self, begin: datetime) -> datetime | None:
        """The first minute after ``begin`` whose wall time matches: examined separately for each offset from UTC."""
        offset = begin.astimezone(self._zone).utcoffset() or _ZERO
        wall = (begin + offset).replace(tzinfo=None)
        while True:
            found = next(CronSim(self._cron, wall), None)
            if found is None:
                return None
            moment = (found - offset).replace(tzinfo=UTC)
            # Far steps would miss two changes that cancel each other.
            until = min(moment, begin + _STEP)
            if (until.astimezone(self._zone).utcoffset() or _ZERO) == offset:
                if until == moment:
                    return moment
                begin = until
                continue
            change = self._change(begin, until)
            if moment < change:
                return moment
            begin, offset = change, change.astimezone(self._zone).utcoffset() or _ZERO
            # The minute of the change counts too: CronSim returns later times than the one that it is given.
            wall = (change + offset).replace(tzinfo=None) - timedelta(seconds=1)

    def _change(self, low: datetime, high: datetime) -> datetime:
        """The first second of the offset that is in force at ``high``; another one is in force at ``low``."""
        offset = high.astimezone(self._zone).utcoffset()
        while high - low > _SECOND:
            middle = low + (high - low) // 2
            middle = middle.replace(microsecond=0)
            if middle.astimezone(self._zone).utcoffset() == offset:
                high = middle
            else:
                low = middle
        return high


def _check(cron: str) -> None:
    if len(cron) > CRON_LENGTH_MAX:
        raise InvalidArgument(
            f"a cron expression of {len(cron)} characters is over the limit of {CRON_LENGTH_MAX}; use a shorter one"
        )
    if len(cron.split()) != 5 or not cron.isascii():
        raise InvalidArgument(f"cron expression {cron!r} does not have five fields; write {_FIELDS}")
    try:
        CronSim(cron, _EPOCH)
    except (CronSimError, ValueError, TypeError, AssertionError) as error:
        # CronSim raises the last two for steps of named days, as in 1#2/2.
        raise InvalidArgument(
            f"cron expression {cron!r} is not valid ({str(error).lower() or 'bad step'}); "
            f"write {_FIELDS}, as in '30 2 * * MON-FRI'"
        ) from None


@lru_cache(maxsize=1_000)
def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError):
        raise InvalidArgument(
            f"time zone {name!r} is not known; use a name of the IANA database, as in 'Europe/Berlin' or 'UTC'"
        ) from None
