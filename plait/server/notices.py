"""Logs lasting states, such as a full disk, when they begin, when their kind changes, and when they end."""

from __future__ import annotations

import logging


class Notices:
    """States of a server, by what they are about. At most ``most`` are remembered."""

    def __init__(self, log: logging.Logger, most: int = 1_000) -> None:
        self._log = log
        self._most = most
        #: What a state is about → its kind.
        self._kinds: dict[str, str] = {}

    def begin(self, about: str, text: str, kind: str = "") -> None:
        """Log ``text`` when the state of ``about`` begins and when its ``kind`` (default: the text) changes."""
        if self._kinds.get(about) != (kind or text):
            while about not in self._kinds and len(self._kinds) >= self._most:
                del self._kinds[next(iter(self._kinds))]
            self._kinds[about] = kind or text
            self._log.warning("%s", text)

    def end(self, about: str, over: str = "") -> None:
        """End the state of ``about``. Logs ``over`` if the state had begun."""
        if self._kinds.pop(about, None) is not None and over:
            self._log.warning("%s", over)
