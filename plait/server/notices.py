"""Logs lasting states, such as a full disk, when they begin, when their kind changes, and when they end."""

from __future__ import annotations

import logging

log = logging.getLogger("plait.server")


class Notice:
    """One state of a server."""

    def __init__(self, over: str, log: logging.Logger = log) -> None:
        """``over`` is logged when the state ends, unless it is empty."""
        self._over = over
        self._log = log
        self._kind = ""

    def begin(self, text: str, kind: str = "") -> None:
        """Log ``text`` when the state begins and when its ``kind`` (default: the text) changes."""
        if self._kind != (kind or text):
            self._kind = kind or text
            self._log.warning("%s", text)

    def end(self) -> None:
        """End the state, if it had begun."""
        if self._kind:
            self._kind = ""
            if self._over:
                self._log.warning("%s", self._over)


class Notices:
    """States of one kind, by what they are about. At most ``most`` are remembered."""

    def __init__(self, log: logging.Logger, most: int = 1_000) -> None:
        self._log = log
        self._most = most
        self._notices: dict[str, Notice] = {}

    def begin(self, about: str, text: str, kind: str = "") -> None:
        """Begin or change the state of ``about``, as ``Notice.begin`` does."""
        if about not in self._notices:
            while len(self._notices) >= self._most:
                del self._notices[next(iter(self._notices))]
            self._notices[about] = Notice("", self._log)
        self._notices[about].begin(text, kind)

    def end(self, about: str, over: str = "") -> None:
        """End the state of ``about``. Logs ``over`` if the state had begun."""
        if self._notices.pop(about, None) is not None and over:
            self._log.warning("%s", over)
