"""Syncs of the logs, one at a time: who waits for one waits for everybody's.

While the disk answers at once, a sync that somebody waits for is run on the loop itself: handing it to a thread and
back takes as long as the sync. One that brings much, or that follows a slow one, goes to a thread, and the loop goes
on. So a disk that hangs holds the loop up once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from plait.broker.commit import SyncWork
from plait.limits import KIB

if TYPE_CHECKING:
    from plait.server.broker_server import Server

log = logging.getLogger("plait.server")

#: A sync that took longer is followed by one in a thread.
QUICK_SECONDS = 0.002
#: So is one of more bytes.
QUICK_SIZE = 256 * KIB


class Syncs:
    """Between the broker, which says what is to be synced, and the disk."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._busy = False
        self._begun = 0.0
        #: How long the last one took, with the way there and back. The first has to show it.
        self._seconds = QUICK_SECONDS

    def begin(self) -> None:
        """Sync what is written, unless that is under way: then the next one follows at its end."""
        server = self._server
        if self._busy or server.ending:
            return
        self._busy = True
        # A checkpoint syncs too, for as long as it takes, and there would be no way past it.
        alone = not server.broker.syncing
        awaited = server.broker.sync_wanted
        self._begun = server.clock.monotonic()
        work = server.broker.begin_sync()
        if awaited and alone and self._seconds < QUICK_SECONDS and work.size <= QUICK_SIZE:
            try:
                work.run()
            except OSError as error:
                self._end(work, error)
            else:
                self._end(work, None)
        else:
            done = server.loop.run_in_executor(server.threads, work.run)
            done.add_done_callback(lambda d: self._end(work, d.exception()))

    def _end(self, work: SyncWork, error: BaseException | None) -> None:
        server = self._server
        self._busy = False
        self._seconds = server.clock.monotonic() - self._begun
        if server.ending:
            # An orderly stop syncs everything itself; after a crash nobody is answered.
            return
        try:
            if isinstance(error, OSError):
                server.broker.storage_failed(error)
            elif error is not None:
                raise error
            else:
                server.broker.end_sync(work)
            if server.broker.failed is not None:
                server.fail(server.broker.failed)
            elif server.broker.sync_wanted:
                self.begin()
        except Exception as defect:
            log.exception("a sync failed")
            server.defect(defect)
