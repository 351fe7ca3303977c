"""States that last: logged when they begin, when their kind changes and when they end, not at every look."""

from __future__ import annotations

import logging

log = logging.getLogger("plait.server")


class Notice:
    """One state of a server, such as a full disk."""

    def __init__(self, over: str) -> None:
        """``over`` is logged when the state ends."""
        self._over = over
        self._kind = ""

    def begin(self, text: str, kind: str = "") -> None:
        """The state is there. ``text`` may have figures that change; it is logged again where ``kind`` is another."""
        if self._kind != (kind or text):
            self._kind = kind or text
            log.warning("%s", text)

    def end(self) -> None:
        """The state is over, or never began."""
        if self._kind:
            self._kind = ""
            log.warning("%s", self._over)
