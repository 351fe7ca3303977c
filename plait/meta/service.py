"""``MetaService``: the decisions of a meta server, as a blocking object without a clock or a socket of its own.

One thread uses it, except for the methods that any thread may call. Several meta servers may share a database: each
mirrors it in memory and reads the changes of the others, and every change is a compare-and-set. So clients and brokers
may talk to any of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from plait.clock import Clock
from plait.limits import NUMBER_STEP_MAX, MetaLimits
from plait.meta.batch_commits import Commits
from plait.meta.brokers import Brokers
from plait.meta.core import Core
from plait.meta.database.mirror import Changes
from plait.meta.database.store import Store
from plait.meta.database.sweep import Sweep
from plait.meta.members.allocator import Allocator
from plait.meta.members.liveness import Peers
from plait.meta.members.membership import Members
from plait.meta.recurring.firings import Firings
from plait.meta.recurring.recurrences import Recurrences
from plait.meta.retiring import Retiring
from plait.meta.route_changes import RouteChanges
from plait.meta.subjects import Subjects
from plait.model.logical_partitions import NumberedRun
from plait.wire.admin.cluster import RegisteredPartition, RegisterReply, State

log = logging.getLogger("plait.meta")


class MetaService:
    """A meta server.

    All calls except ``routing.view`` and ``retiring.remembered`` raise ``MetaUnavailable`` while the database is down.
    """

    def __init__(self, store: Store, clock: Clock, limits: MetaLimits | None = None, *, address: str = "") -> None:
        """``address`` is the address for clients, which other meta servers publish."""
        self._core = Core(store, clock, limits or MetaLimits())
        #: The cluster's id.
        self.cluster = store.cluster
        self.brokers = Brokers(self._core)
        self.subjects = Subjects(self._core, self.brokers)
        self.routing = RouteChanges(self._core, self.brokers, self.subjects)
        self.retiring = Retiring(self._core, self.brokers, self.subjects)
        self.members = Members(self._core)
        self.allocator = Allocator(self._core)
        self.peers = Peers(self._core, address)
        self._sweep = Sweep(self._core)
        self.commits = Commits(self._core)
        self.recurrences = Recurrences(self._core)
        self.firings = Firings(self._core, self.brokers)
        self._ticked = clock.monotonic()

    def tick(self) -> Changes:
        """Update liveness and remove lost clients. Call this every second, and after ``members.next_loss``.

        Returns the changes since the last call of ``tick`` or ``step``.
        """
        now = self._core.clock.monotonic()
        seconds, self._ticked = self._core.noticeable(now - self._ticked), now
        self._core.refresh()
        self.brokers.watch(seconds)
        self.peers.watch(seconds)
        self.members.watch(seconds)
        more = self.members.look()
        self._sweep.run(seconds)
        return self._changes(more=more)

    def step(self) -> Changes:
        """Do one short slice of the pending work. Call this while the result has ``more``.

        Heartbeats can be answered between two slices. Returns the changes since the last call of ``tick`` or ``step``.
        """
        more = self.members.look()
        self.allocator.run()
        return self._changes(more=more)

    @property
    def busy(self) -> bool:
        """True if ``step`` has work to do or changes to return."""
        mirror = self._core.mirror
        return bool(mirror.stale or mirror.unsettled or mirror.new_subjects or mirror.new_groups)

    def _changes(self, *, more: bool) -> Changes:
        mirror = self._core.mirror
        clients = mirror.clients_of(mirror.new_subjects, mirror.new_groups)
        more = more or bool(mirror.stale) or self.allocator.writing is not None
        subjects = bool(mirror.new_subjects)
        mirror.new_subjects, mirror.new_groups = set(), set()
        self.members.changed(clients)
        return Changes(clients, more=more, subjects=subjects)

    def register_broker(
        self,
        group: str,
        broker: str,
        address: str,
        *,
        state: State = "RW",
        epoch: int = 0,
        partitions: Sequence[RegisteredPartition] = (),
        reason: str = "",
    ) -> RegisterReply:
        """Register a broker that has started, with its partitions. The reply has what it may have missed."""
        self._core.refresh()
        self._advance(group, max((facts.newest for facts in partitions), default=0))
        self.brokers.register(group, broker, address, state, epoch, reason)
        unrouted = self.subjects.adopt(group, partitions)
        return RegisterReply(self.cluster, self._floors(group), unrouted, self._core.mirror.seen)

    def _advance(self, group: str, newest: int) -> None:
        """Raise the change counter above ``newest``, which is higher if the database is new or an older copy."""
        seen = self._core.mirror.seen
        believed = min(newest, seen + NUMBER_STEP_MAX)
        if believed < newest:
            # Not refused: the broker could not start.
            log.warning(
                "broker group %s reports change number %d, the highest here is %d: too far ahead, continuing from %d",
                group,
                newest,
                seen,
                believed,
            )
        if believed > seen:
            with self._core.noted():
                self._core.store.advance(believed)

    def _floors(self, group: str) -> list[tuple[str, str, list[NumberedRun]]]:
        """The epochs of the ordered groups of the subjects that have a partition on the broker group."""
        mirror = self._core.mirror
        subjects = {row.subject for place, row in mirror.partitions.items() if place.group == group}
        keys = ((subject, name) for subject in sorted(subjects) for name in sorted(mirror.groups_of.get(subject, ())))
        return [(*key, mirror.allocation(key).floors) for key in keys if mirror.settings[key].ordered]

    def forget_group(self, subject: str, group: str) -> bool:
        """Delete a group without members. Raises ``GroupBusy`` if it has some.

        Returns True if the subject's route remembered it from retired partitions.
        """
        self.members.joining.forget(subject, group)
        return self.retiring.forget_group(subject, group)
