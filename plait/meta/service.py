"""The meta server's decisions in one object: plain, blocking, without a clock or a socket of its own.

One thread uses it, but for what says otherwise. Several meta servers may share a database: each has all of it in memory
and asks for what has changed, and every change is a compare-and-set, so it does not matter which of them a client or a
broker talks to.
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
from plait.meta.views import (
    AllocationView,
    BrokerView,
    Drop,
    HeartbeatView,
    LostPartitionView,
    Make,
    Move,
    PartitionProgress,
    Registered,
    RegisteredPartition,
    Remembered,
    RoutedSubjectView,
    RouteView,
    State,
)
from plait.model.lp_runs import NumberedRun
from plait.model.route import PartitionId, Route
from plait.model.settings import SubjectSettings

log = logging.getLogger("plait.meta")


class MetaService:
    """A meta server. Every call but ``route`` raises ``MetaUnavailable`` while the database is down."""

    def __init__(self, store: Store, clock: Clock, limits: MetaLimits | None = None, *, address: str = "") -> None:
        """``address`` is where clients reach it, for others to name it."""
        self._core = Core(store, clock, limits or MetaLimits())
        self._brokers = Brokers(self._core)
        self._subjects = Subjects(self._core, self._brokers)
        self._routing = RouteChanges(self._core, self._brokers, self._subjects)
        self._retiring = Retiring(self._core, self._brokers, self._subjects)
        self._members = Members(self._core)
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
        """The addresses of all meta servers that live, this one's first."""
        return self._peers.addresses()

    # --- time -----------------------------------------------------------------------------------

    def tick(self) -> Changes:
        """Once a second, and after ``next_loss``: look who lives, and go on with what has to be done.

        What has changed since the last call.
        """
        now = self._core.clock.monotonic()
        seconds, self._ticked = self._core.noticeable(now - self._ticked), now
        self._core.refresh()
        self._brokers.watch(seconds)
        self._peers.watch(seconds)
        self._members.watch(seconds)
        more = self._members.look()
        self._sweep.run(seconds)
        return self._changes(more=more)

    def next_loss(self) -> float:
        """After so many seconds a client is lost if nothing is heard of it."""
        return self._members.next_loss

    def step(self) -> Changes:
        """One slice of the work that waits, short enough for heartbeats to pass: to be called while there is ``more``.

        What has changed since the last call.
        """
        more = self._members.look()
        self._allocating.run()
        return self._changes(more=more)

    @property
    def busy(self) -> bool:
        """There is something for ``step`` to do, or to tell."""
        mirror = self._core.mirror
        return bool(mirror.stale or mirror.unsettled or mirror.new_subjects or mirror.new_groups or mirror.new_brokers)

    @property
    def writing(self) -> AllocationWrite | None:
        """To be carried out before the next ``step``, by any thread: then no heartbeat waits for the database."""
        return self._allocating.writing

    def _changes(self, *, more: bool) -> Changes:
        mirror = self._core.mirror
        clients = mirror.clients_of(mirror.new_subjects, mirror.new_groups)
        more = more or bool(mirror.stale) or self.writing is not None
        changes = Changes(mirror.new_subjects, mirror.new_groups, mirror.new_brokers, clients, more=more)
        mirror.new_subjects, mirror.new_groups, mirror.new_brokers = set(), set(), set()
        self._members.changed(clients)
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
        """A broker has started: it says what it has, and learns what it may have missed."""
        self._core.refresh()
        self._advance(group, max((facts.newest for facts in partitions), default=0))
        self._brokers.register(group, broker, address, state, epoch, reason)
        unrouted = self._subjects.adopt(group, partitions)
        return Registered(self.cluster, self._floors(group), unrouted, self.newest)

    def _advance(self, group: str, newest: int) -> None:
        """A broker knows a higher number: the database is an older copy of itself, or a new one."""
        seen = self._core.mirror.seen
        believed = min(newest, seen + NUMBER_STEP_MAX)
        if believed < newest:
            # Refused, it would keep the broker from starting.
            log.warning(
                "broker group %s knows number %d, the highest here is %d: not believed, counting on from %d",
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
        """How far the counter has come that routes and epochs are numbered by."""
        return self._core.mirror.seen

    def beat_broker(self, group: str, broker: str, state: State, reason: str = "") -> bool:
        """A broker lives and is in that state; False: it is not known here and has to register again."""
        return self._brokers.beat(group, broker, state, reason)

    def settled(self) -> bool:
        """Every broker has been heard of, or is lost: who is chosen now is there."""
        self._core.refresh()
        return self._brokers.settled()

    def set_broker_state(self, group: str, state: State) -> None:
        """What the operator wishes of a broker group."""
        self._brokers.wish(group, state)

    def brokers(self) -> list[BrokerView]:
        """All brokers, as this meta server sees them."""
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
        """A new subject; ``SubjectExists``, or ``NoBroker`` while no broker group is there to take it."""
        self._subjects.create(name, settings or SubjectSettings(), partitions, groups)

    def update_subject(self, name: str, settings: SubjectSettings) -> None:
        self._subjects.update(name, settings)

    def set_subject(self, name: str, settings: dict[str, Any]) -> None:
        """Change the settings that are named."""
        self._core.refresh()
        self._subjects.update(name, msgspec.structs.replace(self._subjects.settings(name), **settings))

    def forget_group(self, subject: str, group: str) -> bool:
        """A group that has no members is gone; ``GroupBusy`` while it has some.

        Whether partitions that have left the subject's route knew it.
        """
        self._core.refresh()
        self._members.forget_group(subject, group)
        return self._retiring.forget_group(subject, group)

    def remembered(self, subject: str, group: str) -> Remembered:
        """Whether partitions that have left the subject's route knew a group; known without the database, as routes."""
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
        """Where the subject is; it is made if it does not exist and ``create`` allows it.

        While the database is down: where it was when the database answered last. That is safe, as brokers refuse what
        an outdated route leads to them, and it lets new processes send and consume.
        """
        self._look()
        if self._core.down is None:
            return self._routing.view(subject, create=create)
        row = self._core.mirror.subjects.get(subject)
        if row is None or row.deleted:
            # It may have been made meanwhile.
            raise MetaUnavailable(self._core.down.message, **self._core.down.details)
        return self._routing.view(subject, create=False)

    def _look(self) -> None:
        """Hear what is new, if the database answers."""
        try:
            if self._core.down is None:
                self._core.refresh()
        except MetaUnavailable as error:
            log.warning("routes are answered as they were known last: %s", error)

    def expand(self, subject: str, partitions: int | Sequence[PartitionId]) -> Route:
        """So many partitions, or these, are to take the subject's messages; more or fewer than now.

        What follows is carried out order by order: ``pending_makes``, ``pending_moves``.
        """
        return self._routing.retarget(subject, partitions)

    def pending_makes(self, subject: str | None = None) -> list[Make]:
        """Orders to brokers to make partitions and to open them, of one subject or all."""
        return self._routing.makes(subject)

    def unmade(self, subject: str) -> list[Make]:
        """Those of a subject without which its route leads nowhere."""
        return self._routing.unmade(subject)

    def made(self, make: Make) -> None:
        """A broker has carried it out."""
        self._routing.made(make)

    def pending_moves(self, subject: str | None = None) -> list[Move]:
        """Orders to brokers to seal logical partitions."""
        return self._routing.moves(subject)

    def sealed(self, move: Move, fences: Sequence[NumberedRun]) -> None:
        """A broker has carried it out: (first, end, fence) of each run of logical partitions."""
        self._routing.sealed(move, fences)

    def pending_drops(self) -> list[Drop]:
        """Orders to brokers to drop partitions."""
        return self._routing.drops()

    def dropped(self, drop: Drop) -> None:
        """A broker has carried it out."""
        self._routing.dropped(drop)

    def report_progress(self, group: str, broker: str, reports: Sequence[PartitionProgress]) -> bool:
        """A broker says what is finished in its partitions; False: it is not known here and has to register again."""
        if not self._brokers.knows(group, broker):
            return False
        self._retiring.report(group, reports)
        return True

    def forget_broker(self, group: str, *, lost: bool = False) -> list[LostPartitionView]:
        """Give up a broker group that will not come back; what is lost with it, if ``lost`` allows that."""
        self._core.refresh()
        return self._retiring.forget(group, lost=lost)

    # --- members --------------------------------------------------------------------------------

    def beat_client(
        self,
        client: str,
        members: Sequence[Membership],
        *,
        seen: int = 0,
        leaving: bool = False,
        affinity: Collection[tuple[str, str]] = (),
    ) -> HeartbeatView:
        """A client lives and is a member of these (subject, group, ordered), and of no others.

        It hears what is newer than ``seen``, the number of an earlier answer to the same members; 0: all there is.
        Of those whose (subject, group) is in ``affinity`` it is a member by affinity, which is a kind of ordered.
        Joins and leaves are noted at once; the allocation that follows from them is the work of ``step``.
        """
        return self._members.beat(client, members, seen=seen, leaving=leaving, affinity=affinity)

    def repeat_client(
        self, client: str, members: Sequence[Membership], affinity: Collection[tuple[str, str]], seen: int
    ) -> HeartbeatView | None:
        """The answer to a heartbeat that says nothing new, where it can be given at once; None: ``beat_client``.

        From any thread, whatever else this server does. What has changed by then and not come out of ``step`` or
        ``tick`` may not be in it.
        """
        return self._members.repeat(client, members, affinity, seen)

    def leave_client(self, client: str) -> Leave:
        """A client leaves all its groups. ``beat_client`` in three parts: the second one waits for the database."""
        return self._members.leave(client)

    def carry_out(self, leave: Leave) -> None:
        """The second part, for any thread but one at a time: write it, and others that wait.

        Who beats before it is done waits for the database, and carries it out.
        """
        self._members.carry_out(leave)

    def left_client(self, leave: Leave) -> HeartbeatView:
        """The third part: the client is out, or why not."""
        return self._members.left(leave)

    def client(self, client: str, seen: int = 0) -> HeartbeatView:
        """The same answer for a client that has said nothing new."""
        return self._members.known(client, seen)

    def client_news(self, client: str, seen: int) -> HeartbeatView | None:
        """The same from any thread, where it can be given at once; None: ``client``."""
        return self._members.news(client, seen)

    def allocation(self, subject: str, group: str) -> AllocationView:
        """Who is to handle what of a group."""
        self._core.refresh()
        return self._members.view(subject, group)
