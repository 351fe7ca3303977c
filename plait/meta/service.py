"""``MetaService``: the decisions of a meta server, as a blocking object without a clock or a socket of its own.

One thread uses it, except for the methods that any thread may call. Several meta servers may share a database: each
mirrors it in memory and reads the changes of the others, and every change is a compare-and-set. So clients and brokers
may talk to any of them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from plait.clock import Clock
from plait.errors import MetaUnavailable
from plait.limits import NUMBER_STEP_MAX, MetaLimits
from plait.meta.batch_commits import Commits
from plait.meta.brokers import Brokers
from plait.meta.core import Core
from plait.meta.database.mirror import Changes
from plait.meta.database.store import Store
from plait.meta.database.sweep import Sweep
from plait.meta.members.allocator import AllocationWrite, Allocator
from plait.meta.members.leaving import Leave
from plait.meta.members.membership import Members, Membership
from plait.meta.members.peers import Peers
from plait.meta.retiring import Retiring
from plait.meta.route_changes import RouteChanges
from plait.meta.subjects import Subjects
from plait.meta.views import HeartbeatView, Registered, RoutedSubjectView, RouteView
from plait.model.logical_partitions import NumberedRun
from plait.model.route import PartitionId, Route
from plait.model.settings import SubjectSettings
from plait.wire.admin.cluster import (
    AllocationReply,
    BrokerInfo,
    LostPartition,
    PartitionProgress,
    RegisteredPartition,
    State,
)
from plait.wire.admin.subjects import Remembered

log = logging.getLogger("plait.meta")


class MetaService:
    """A meta server.

    All calls except ``route`` and ``remembered`` raise ``MetaUnavailable`` while the database is down.
    """

    def __init__(self, store: Store, clock: Clock, limits: MetaLimits | None = None, *, address: str = "") -> None:
        """``address`` is the address for clients, which other meta servers publish."""
        self._core = Core(store, clock, limits or MetaLimits())
        self._brokers = Brokers(self._core)
        self._subjects = Subjects(self._core, self._brokers)
        #: Changes of routes, and the broker orders that carry them out.
        self.routing = RouteChanges(self._core, self._brokers, self._subjects)
        self._retiring = Retiring(self._core, self._brokers, self._subjects)
        self.members = Members(self._core)
        self._allocating = Allocator(self._core)
        self._peers = Peers(self._core, address)
        self._sweep = Sweep(self._core)
        #: Batches of Spark's sinks.
        self.commits = Commits(self._core)
        self._ticked = clock.monotonic()

    @property
    def cluster(self) -> str:
        """The cluster's id."""
        return self._core.store.cluster

    def metas(self) -> list[str]:
        """The addresses of all live meta servers, this one first."""
        return self._peers.addresses()

    # --- time -----------------------------------------------------------------------------------

    def tick(self) -> Changes:
        """Update liveness and remove lost clients. Call this every second, and after ``members.next_loss``.

        Returns the changes since the last call of ``tick`` or ``step``.
        """
        now = self._core.clock.monotonic()
        seconds, self._ticked = self._core.noticeable(now - self._ticked), now
        self._core.refresh()
        self._brokers.watch(seconds)
        self._peers.watch(seconds)
        self.members.watch(seconds)
        more = self.members.look()
        self._sweep.run(seconds)
        return self._changes(more=more)

    def step(self) -> Changes:
        """Do one short slice of the pending work. Call this while the result has ``more``.

        Heartbeats can be answered between two slices. Returns the changes since the last call of ``tick`` or ``step``.
        """
        more = self.members.look()
        self._allocating.run()
        return self._changes(more=more)

    @property
    def busy(self) -> bool:
        """True if ``step`` has work to do or changes to return."""
        mirror = self._core.mirror
        return bool(mirror.stale or mirror.unsettled or mirror.new_subjects or mirror.new_groups or mirror.new_brokers)

    @property
    def writing(self) -> AllocationWrite | None:
        """A write that any thread may do before the next ``step``, so that no heartbeat waits for the database."""
        return self._allocating.writing

    def _changes(self, *, more: bool) -> Changes:
        mirror = self._core.mirror
        clients = mirror.clients_of(mirror.new_subjects, mirror.new_groups)
        more = more or bool(mirror.stale) or self.writing is not None
        changes = Changes(mirror.new_subjects, mirror.new_groups, mirror.new_brokers, clients, more=more)
        mirror.new_subjects, mirror.new_groups, mirror.new_brokers = set(), set(), set()
        self.members.changed(clients)
        return changes

    # --- brokers --------------------------------------------------------------------------------

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
    ) -> Registered:
        """Register a broker that has started, with its partitions. The reply has what it may have missed."""
        self._core.refresh()
        self._advance(group, max((facts.newest for facts in partitions), default=0))
        self._brokers.register(group, broker, address, state, epoch, reason)
        unrouted = self._subjects.adopt(group, partitions)
        return Registered(self.cluster, self._floors(group), unrouted, self.newest)

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

    def _floors(self, group: str) -> dict[tuple[str, str], list[NumberedRun]]:
        mirror = self._core.mirror
        subjects = {row.subject for place, row in mirror.partitions.items() if place.group == group}
        keys = ((subject, name) for subject in sorted(subjects) for name in sorted(mirror.groups_of.get(subject, ())))
        return {key: mirror.allocation(key).floors for key in keys if mirror.settings[key].ordered}

    @property
    def newest(self) -> int:
        """The newest change number. Route versions and epochs are change numbers."""
        return self._core.mirror.seen

    def broker_heartbeat(self, group: str, broker: str, state: State, reason: str = "") -> bool:
        """Record a broker's heartbeat and state. Returns False if the broker must register again."""
        return self._brokers.heartbeat(group, broker, state, reason)

    def settled(self) -> bool:
        """True once every broker has a confirmed heartbeat or is lost, so that a choice of brokers is sound."""
        self._core.refresh()
        return self._brokers.settled()

    def set_broker_state(self, group: str, state: State) -> None:
        """Set the state that the operator wants for a broker group."""
        self._brokers.wish(group, state)

    def brokers(self) -> list[BrokerInfo]:
        """All brokers, as this meta server knows them."""
        self._core.refresh()
        return self._brokers.views()

    # --- subjects -------------------------------------------------------------------------------

    def create_subject(
        self,
        name: str,
        settings: SubjectSettings | None = None,
        *,
        partitions: int | Sequence[PartitionId] | None = None,
        groups: Sequence[str] | None = None,
    ) -> None:
        """Create a subject. Raises ``SubjectExists``, or ``NoBroker`` if no broker group is available."""
        self._subjects.create(name, settings or SubjectSettings(), partitions, groups)

    def set_subject(self, name: str, settings: dict[str, Any]) -> None:
        """Change the named settings; the others stay."""
        self._core.refresh()
        self._subjects.update(name, msgspec.structs.replace(self._subjects.settings(name), **settings))

    def forget_group(self, subject: str, group: str) -> bool:
        """Delete a group without members. Raises ``GroupBusy`` if it has some.

        Returns True if the subject's route remembered it from retired partitions.
        """
        self._core.refresh()
        self.members.joining.forget(subject, group)
        return self._retiring.forget_group(subject, group)

    def remembered(self, subject: str, group: str) -> Remembered:
        """Whether retired partitions of the subject knew a group.

        Answered from the mirror while the database is down.
        """
        self._look()
        return self._retiring.remembered(subject, group)

    def delete_subject(self, name: str) -> None:
        self._subjects.delete(name)

    def subjects(self) -> list[RoutedSubjectView]:
        self._core.refresh()
        return self._subjects.views()

    def subject(self, name: str) -> RoutedSubjectView:
        self._core.refresh()
        return self._subjects.view(name)

    # --- routes ---------------------------------------------------------------------------------

    def route(self, subject: str, *, create: bool = True) -> RouteView:
        """The route of a subject. With ``create``, a subject that does not exist is created.

        While the database is down, the reply is the last known route. That is safe, because brokers refuse requests
        under an outdated route, and it lets new processes send and consume.
        """
        self._look()
        if self._core.down is None:
            return self.routing.view(subject, create=create)
        row = self._core.mirror.subjects.get(subject)
        if row is None or row.deleted:
            # Another meta server may have created it meanwhile.
            raise MetaUnavailable(self._core.down.message, **self._core.down.details)
        return self.routing.view(subject, create=False)

    def _look(self) -> None:
        """Refresh the mirror if the database is available."""
        try:
            if self._core.down is None:
                self._core.refresh()
        except MetaUnavailable as error:
            log.warning("the meta database is down, replies have the last known routes: %s", error)

    def expand(self, subject: str, partitions: int | Sequence[PartitionId]) -> Route:
        """Set how many partitions, or which, take the subject's messages; more or fewer than now.

        The change is then applied order by order: ``routing.makes``, ``routing.moves``.
        """
        return self.routing.retarget(subject, partitions)

    def report_progress(self, group: str, broker: str, reports: Sequence[PartitionProgress]) -> bool:
        """Store a broker's reports of finished LPs and removed rows.

        Returns False if the broker must register again.
        """
        if not self._brokers.knows(group, broker):
            return False
        self._retiring.report(group, reports)
        return True

    def forget_broker(self, group: str, *, lost: bool = False) -> list[LostPartition]:
        """Remove a broker group that will not return; with ``lost``, even if messages are lost.

        Returns what is lost.
        """
        self._core.refresh()
        return self._retiring.forget(group, lost=lost)

    # --- members --------------------------------------------------------------------------------

    def client_heartbeat(
        self,
        client: str,
        members: Sequence[Membership],
        *,
        seen: int = 0,
        leaving: bool = False,
        affinity: Collection[tuple[str, str]] = (),
    ) -> HeartbeatView:
        """Answer a heartbeat: the client is a member of exactly these (subject, group, ordered).

        The reply has what is newer than ``seen``, the number of an earlier reply for the same members; everything if it
        is 0. Ordered groups whose (subject, group) is in ``affinity`` are affinity groups. Joins and leaves are written
        at once; ``step`` computes the allocation that follows.
        """
        return self.members.heartbeat(client, members, seen=seen, leaving=leaving, affinity=affinity)

    def repeated_heartbeat(
        self, client: str, members: Sequence[Membership], affinity: Collection[tuple[str, str]], seen: int
    ) -> HeartbeatView | None:
        """Answer a heartbeat that repeats the last one. Returns None if ``client_heartbeat`` must answer it.

        Any thread may call this at any time. The reply may lack changes that ``step`` or ``tick`` has not returned yet.
        """
        return self.members.repeat(client, members, affinity, seen)

    def leave_client(self, client: str) -> Leave:
        """Begin a client's leave from all its groups.

        The leave is then written by ``carry_out``, which waits for the database, and completed by ``left_client``.
        """
        return self.members.leave(client)

    def carry_out(self, leave: Leave) -> None:
        """Write a leave together with others that wait. Any thread may call this, one at a time.

        A heartbeat of the client before that carries out the leave itself and waits for the database.
        """
        self.members.carry_out(leave)

    def left_client(self, leave: Leave) -> HeartbeatView:
        """Complete a leave. Raises the error of a failed write."""
        return self.members.left(leave)

    def client(self, client: str, seen: int = 0) -> HeartbeatView:
        """The reply of ``client_heartbeat`` for the memberships of the client's last heartbeat."""
        return self.members.known(client, seen)

    def client_news(self, client: str, seen: int) -> HeartbeatView | None:
        """The reply of ``client``, for any thread. Returns None if ``client`` must be called."""
        return self.members.news(client, seen)

    def allocation(self, subject: str, group: str) -> AllocationReply:
        """The members of a group and their shares."""
        self._core.refresh()
        return self._allocating.view(subject, group)
