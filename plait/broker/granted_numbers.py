"""Plausibility of the numbers that meta servers assign: route versions and lock epochs.

All these numbers come from one counter that only grows, and a higher number always wins. An invented high number would
therefore block every later decision of the meta servers. So a broker accepts a number only if it is near the highest
known number.
"""

from __future__ import annotations

from plait.errors import InvalidArgument
from plait.limits import NUMBER_MAX, NUMBER_STEP_MAX


class GrantedNumbers:
    """The highest value that the counter of the meta servers can have."""

    def __init__(self) -> None:
        #: The highest number that a meta server reported, or that the logs had when this broker started. Numbers that
        #: clients send do not raise it.
        self.known = 0

    def learn(self, number: int) -> None:
        """Raise ``known`` to this number. A log may hold any value: at least one step below ``NUMBER_MAX`` is left."""
        self.known = max(self.known, min(number, NUMBER_MAX - NUMBER_STEP_MAX))

    def check(self, what: str, number: int) -> None:
        """Refuse a number that no meta server can have assigned."""
        if not 0 <= number <= self.known + NUMBER_STEP_MAX:
            raise InvalidArgument(
                f"no meta server assigned {what} {number}: the highest known number is {self.known}; "
                "get the current one from a meta server"
            )
