"""The numbers that meta servers give out: versions of routes, and epochs of locks.

All come from one counter, which only goes up. Whatever carries a higher number prevails, so a made-up one would shut
out everything that meta servers say later. A number is therefore believed only near what is known.
"""

from __future__ import annotations

from plait.errors import InvalidArgument
from plait.limits import NUMBER_MAX, NUMBER_STEP_MAX


class GrantedNumbers:
    """How far the meta servers' counter can have come."""

    def __init__(self) -> None:
        #: The highest number that a meta server reported, or that this broker's logs had when it started. What clients
        #: send does not raise it.
        self.known = 0

    def learn(self, number: int) -> None:
        """The counter has come at least this far. A log may say anything: room for what follows is kept."""
        self.known = max(self.known, min(number, NUMBER_MAX - NUMBER_STEP_MAX))

    def check(self, what: str, number: int) -> None:
        """Refuse a number that no meta server can have given out."""
        if not 0 <= number <= self.known + NUMBER_STEP_MAX:
            raise InvalidArgument(
                f"{what} {number} is not one that a meta server gave out: the highest known is {self.known}; "
                "ask a meta server"
            )
