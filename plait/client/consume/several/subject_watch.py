"""``SubjectWatch``: the subjects that match patterns, now and after each change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from plait.client.net.router import Router
from plait.errors import LimitExceeded, PlaitError, Unavailable
from plait.limits import SUBSCRIBED_SUBJECTS_MAX, ClientLimits
from plait.model.subject_patterns import SubjectPatterns
from plait.wire.admin.subjects import MATCH_SUBJECTS, MatchedSubjects

log = logging.getLogger("plait.client")


class SubjectWatch:
    """Asks a meta server for matching subjects. The server answers after a change, or when the wait is over."""

    def __init__(self, router: Router, limits: ClientLimits, patterns: SubjectPatterns) -> None:
        self._router = router
        self._limits = limits
        self.patterns = patterns
        self._seen = -1
        self._warned = False

    async def first(self, deadline: float) -> list[str]:
        """The subjects that match now; raises ``LimitExceeded`` if there are too many."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                found = await self._ask(0.0)
            except Unavailable:
                if loop.time() >= deadline:
                    raise
            else:
                if found.more:
                    raise LimitExceeded(
                        f"more than {SUBSCRIBED_SUBJECTS_MAX} subjects match {str(self.patterns)!r}, and this is the "
                        "limit of one consumer (SUBSCRIBED_SUBJECTS_MAX); use a longer prefix, or several consumers",
                        limit="SUBSCRIBED_SUBJECTS_MAX",
                        value=SUBSCRIBED_SUBJECTS_MAX,
                    )
                return found.names

    async def follow(self, changed: Callable[[list[str]], None]) -> None:
        """Call ``changed`` with the subjects that match after each change, until cancelled."""
        pause = self._limits.reconnect_first_seconds
        while True:
            try:
                found = await self._ask(self._limits.pull_wait_seconds)
            except PlaitError as error:
                log.info("cannot ask which subjects match %s (this is tried again): %s", self.patterns, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, self._limits.reconnect_max_seconds)
                continue
            pause = self._limits.reconnect_first_seconds
            if found.more and not self._warned:
                self._warned = True
                log.warning(
                    "more than %d subjects match %s, and this is the limit of one consumer (SUBSCRIBED_SUBJECTS_MAX); "
                    "the others are not consumed: use a longer prefix, or several consumers",
                    SUBSCRIBED_SUBJECTS_MAX,
                    self.patterns,
                )
            changed(found.names)

    async def _ask(self, wait: float) -> MatchedSubjects:
        request = MATCH_SUBJECTS.packet(patterns=self.patterns.texts, seen=self._seen, wait=wait)
        found = MATCH_SUBJECTS.result(await self._router.meta.request(request, wait + self._limits.request_seconds))
        self._seen = found.seen
        return found
