"""Syncs of the logs, one at a time; one sync serves all requests that wait for durability.

While the disk is fast, a sync that a request waits for runs on the event loop itself, because handing it to a thread
and back takes as long as the sync. A large sync, or one after a slow sync, runs in a thread, and the loop continues. So
a disk that hangs blocks the loop at most once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from plait.broker.commit import SyncWork
from plait.limits import KIB

if TYPE_CHECKING:
    from plait.server.broker_server import Server

log = logging.getLogger("plait.server")

#: After a slower sync, the next one runs in a thread.
QUICK_SECONDS = 0.002
#: A larger sync runs in a thread.
QUICK_SIZE = 256 * KIB


class Syncs:
    """Runs the syncs that the broker asks for."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._busy = False
        self._begun = 0.0
        #: Duration of the last sync, with the hand-over. Initially slow: the first sync runs in a thread.
        self._seconds = QUICK_SECONDS

    def begin(self) -> None:
        """Start a sync, unless one is running; the next one then follows at its end."""
        server = self._server
        if self._busy or server.ending:
            return
        self._busy = True
        # A checkpoint syncs too, and this sync would have to wait for it on the loop.
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
            # A clean stop syncs everything itself; after a crash no request is answered.
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
