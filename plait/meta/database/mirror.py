"""A meta server's copy of the database in memory, as of one change.

Changes of this meta server and of others are applied in the order of their numbers, so the mirror always equals the
database after some change. One thread applies changes. Another thread may read only while it holds ``changing``.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from plait.errors import InvalidArgument
from plait.meta.database.schema import (
    AllocationRow,
    BrokerRow,
    GroupRow,
    MemberRow,
    PartitionAssignment,
    RouteRow,
    SubjectRow,
    TableRow,
)
from plait.meta.database.store import News, StoreChange
from plait.meta.members.allocation import Allocation, decode
from plait.meta.members.shares import Shares
from plait.model.route import PartitionId, Route
from plait.model.settings import GroupSettings, group_settings

#: A subject and the name of a group of it.
GroupKey = tuple[str, str]

_route = msgspec.msgpack.Decoder(Route)


class Changes(NamedTuple):
    """The changes since the last call of ``MetaService.step`` or ``tick``, and the clients to notify."""

    #: Members of groups whose allocation changed, or of any group of a subject whose route changed.
    clients: set[str]
    #: There is more work; call ``step`` again at once.
    more: bool
    #: Subjects were created or deleted.
    subjects: bool = False


class Allocated:
    """What heartbeats need of an ordered group's allocation. The object lives as long as the group."""

    __slots__ = ("changed", "key", "shares")

    def __init__(self, key: GroupKey) -> None:
        self.key = key
        #: The change that made the allocation.
        self.changed = 0
        #: None until the shares are packed.
        self.shares: Shares | None = None


class Packed(NamedTuple):
    """An allocation that was just written, decoded and packed for heartbeats."""

    body: bytes
    allocation: Allocation
    shares: Shares


class Mirror:
    """All rows by key, and indexes for frequent questions."""

    def __init__(self) -> None:
        #: The last applied change; -1 before the first.
        self.seen = -1
        #: Held while changes are applied, never during a database call.
        self.changing = threading.Lock()
        self.new_subjects: set[str] = set()
        self.new_groups: set[GroupKey] = set()
        self._turn = 0
        #: Counts changes of routes.
        self.route_turn = 0
        self._clear()

    def _clear(self) -> None:
        #: The turn of the last change that affects all clients, and per client; see ``turn_of``.
        self._turn_of_all = self._next_turn()
        self._turns: dict[str, int] = {}
        self.brokers: dict[str, dict[str, BrokerRow]] = defaultdict(dict)
        self.subjects: dict[str, SubjectRow] = {}
        #: The last change of a subject, and the names of all subjects that are not deleted, if ``names`` sorted them.
        self.subjects_changed = 0
        self._names: list[str] | None = None
        self.routes: dict[str, RouteRow] = {}
        self.partitions: dict[PartitionId, PartitionAssignment] = {}
        self.partitions_of: dict[str, set[PartitionId]] = defaultdict(set)
        #: Partitions per broker group.
        self.load: dict[str, int] = defaultdict(int)
        self.groups: dict[GroupKey, GroupRow] = {}
        self.groups_of: dict[str, set[str]] = defaultdict(set)
        self.settings: dict[GroupKey, GroupSettings] = {}
        self.allocations: dict[GroupKey, AllocationRow] = {}
        self.allocated: dict[GroupKey, Allocated] = {}
        #: Online members, by group and by client.
        self.members: dict[GroupKey, dict[str, MemberRow]] = defaultdict(dict)
        self.memberships: dict[str, set[GroupKey]] = defaultdict(set)
        #: Members that have left and are still in the database.
        self.left: dict[tuple[str, str, str], MemberRow] = {}
        #: The last change of each group's members.
        self.touched: dict[GroupKey, int] = defaultdict(int)
        #: Groups whose allocation may be older than their members, the longest waiting first.
        self.stale: dict[GroupKey, None] = {}
        #: Subjects whose route or partitions changed since ``RouteChanges`` computed their orders.
        self.unsettled: set[str] = set()
        self.dropping: set[PartitionId] = set()
        self._decoded: dict[GroupKey, Allocation] = {}

    def take(self, news: News, packed: Mapping[GroupKey, Packed]) -> None:
        if news.number == self.seen and not news.everything:
            return
        with self.changing:
            if news.everything:
                before = set(self.subjects)
                self.new_subjects |= before
                self.new_groups.update(self.allocations)
                self._clear()
                self.unsettled |= before
            for row in news.rows:
                self._apply(row)
            self._remember(packed)
            self.seen = news.number

    def follows(self, change: StoreChange) -> bool:
        """True if the change directly follows the mirror: no other meta server made a change in between."""
        return change.number == self.seen + 1

    def take_own(self, change: StoreChange, packed: Mapping[GroupKey, Packed]) -> None:
        """Apply a change of this meta server that ``follows`` the mirror."""
        with self.changing:
            for row in change.rows:
                self._apply(row)
            for row in change.removed:
                self._remove(row)
            self._remember(packed)
            self.seen = change.number

    # --- questions ------------------------------------------------------------------------------

    def subject(self, name: str) -> SubjectRow | None:
        """A subject that is not deleted."""
        row = self.subjects.get(name)
        return None if row is None or row.deleted else row

    def names(self) -> list[str]:
        """The names of all subjects that are not deleted, sorted."""
        if self._names is None:
            self._names = sorted(name for name, row in self.subjects.items() if not row.deleted)
        return self._names

    def check_group(self, group: str) -> None:
        """Check that a broker group exists."""
        if group not in self.brokers:
            raise InvalidArgument(f"there is no broker group {group!r}; there are {', '.join(sorted(self.brokers))}")

    def is_taken(self, place: PartitionId) -> bool:
        """True if the partition exists, or if its broker has not confirmed that it is dropped."""
        row = self.partitions.get(place)
        return row is not None and row.state != "gone"

    def route(self, subject: str) -> Route:
        return _route.decode(self.routes[subject].body)

    def allocation(self, key: GroupKey) -> Allocation:
        known = self._decoded.get(key)
        if known is None:
            known = self._decoded[key] = decode(self.allocations[key].body)
        return known

    def shares(self, key: GroupKey) -> Shares:
        """The allocation as it is sent to members."""
        allocated = self.allocated[key]
        if allocated.shares is None:
            allocated.shares = Shares(*key, self.allocation(key))
        return allocated.shares

    def turn_of(self, client: str) -> int:
        """A number that changes whenever the memberships of a client, or the settings of its groups, may have changed.

        Any thread may call this.
        """
        return max(self._turn_of_all, self._turns.get(client, 0))

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def clients_of(self, subjects: Iterable[str], groups: Iterable[GroupKey]) -> set[str]:
        """The members of these groups, and of all groups of these subjects."""
        keys = {*groups, *((subject, name) for subject in subjects for name in self.groups_of.get(subject, ()))}
        return {client for key in keys for client in self.members.get(key, ())}

    # --- rows -----------------------------------------------------------------------------------

    def _apply(self, row: TableRow) -> None:
        match row:
            case MemberRow():
                self._apply_member(row)
            case AllocationRow():
                key = (row.subject, row.name)
                self.allocations[key] = row
                self._decoded.pop(key, None)
                allocated = self.allocated.setdefault(key, Allocated(key))
                allocated.changed, allocated.shares = row.changed, None
                self.new_groups.add(key)
                self._look_at(key)
            case RouteRow():
                self.routes[row.subject] = row
                self.route_turn += 1
                self.new_subjects.add(row.subject)
                self.unsettled.add(row.subject)
            case PartitionAssignment():
                self._apply_partition(row)
            case SubjectRow():
                self._apply_subject(row)
            case GroupRow():
                self._touch_members((row.subject, row.name))
                self.groups[row.subject, row.name] = row
                self.settings[row.subject, row.name] = group_settings(row.settings)
                self.groups_of[row.subject].add(row.name)
            case BrokerRow():
                self.brokers[row.broker_group][row.broker] = row

    def _apply_subject(self, row: SubjectRow) -> None:
        listed, names = self.subject(row.name) is not None, self._names
        self.subjects[row.name] = row
        self.new_subjects.add(row.name)
        self.unsettled.add(row.name)
        self.subjects_changed = max(self.subjects_changed, row.changed)
        if names is not None and listed == row.deleted:
            at = bisect_left(names, row.name)
            names[at : at + row.deleted] = [] if row.deleted else [row.name]

    def _touch_members(self, key: GroupKey) -> None:
        """The group changed: the next heartbeat of each of its members must be checked against it."""
        turn = self._next_turn()
        for client in self.members.get(key, ()):
            self._turns[client] = turn

    def _apply_member(self, row: MemberRow) -> None:
        self._turns[row.client] = self._next_turn()
        key = (row.subject, row.name)
        if row.online:
            self.members[key][row.client] = row
            self.memberships[row.client].add(key)
            self.left.pop((*key, row.client), None)
        else:
            self.members[key].pop(row.client, None)
            self._leave(row.client, key)
            self.left[*key, row.client] = row
        self.touched[key] = max(self.touched[key], row.changed)
        self._look_at(key)

    def _leave(self, client: str, key: GroupKey) -> None:
        of = self.memberships.get(client)
        if of is not None:
            of.discard(key)
            if not of:
                del self.memberships[client]

    def _remember(self, packed: Mapping[GroupKey, Packed]) -> None:
        """Store packed shares together with the rows, so that heartbeats need not pack them."""
        for key, each in packed.items():
            row = self.allocations.get(key)
            if row is not None and row.body == each.body:
                self._decoded[key], self.allocated[key].shares = each.allocation, each.shares

    def _look_at(self, key: GroupKey) -> None:
        allocation = self.allocations.get(key)
        if allocation is not None and allocation.seen < self.touched[key]:
            self.stale[key] = None
        else:
            self.stale.pop(key, None)

    def _apply_partition(self, row: PartitionAssignment) -> None:
        place = PartitionId(row.name, row.broker_group)
        before = self.partitions.get(place)
        if before is not None:
            self.partitions_of[before.subject].discard(place)
            self.load[place.group] -= before.state == "kept"
        self.partitions[place] = row
        self.load[place.group] += row.state == "kept"
        if row.state == "kept":
            self.partitions_of[row.subject].add(place)
            self.unsettled.add(row.subject)
        if row.state == "dropping":
            self.dropping.add(place)
        else:
            self.dropping.discard(place)

    def _remove(self, row: TableRow) -> None:
        match row:
            case MemberRow():
                self.left.pop((row.subject, row.name, row.client), None)
                if row.client not in self.memberships and self._turns.pop(row.client, None) is not None:
                    # The client must not get its earlier number again.
                    self._turn_of_all = self._next_turn()
            case AllocationRow():
                self.allocations.pop((row.subject, row.name), None)
                self.allocated.pop((row.subject, row.name), None)
                self._decoded.pop((row.subject, row.name), None)
                self.stale.pop((row.subject, row.name), None)
            case RouteRow():
                self.routes.pop(row.subject, None)
                self.route_turn += 1
            case PartitionAssignment():
                self.partitions.pop(PartitionId(row.name, row.broker_group), None)
            case SubjectRow():
                self.subjects.pop(row.name, None)
                self.groups_of.pop(row.name, None)
                self.partitions_of.pop(row.name, None)
            case GroupRow():
                self._touch_members((row.subject, row.name))
                self.groups.pop((row.subject, row.name), None)
                self.settings.pop((row.subject, row.name), None)
                self.touched.pop((row.subject, row.name), None)
                self.members.pop((row.subject, row.name), None)
                self.groups_of[row.subject].discard(row.name)
            case BrokerRow():
                self.brokers[row.broker_group].pop(row.broker, None)
                if not self.brokers[row.broker_group]:
                    del self.brokers[row.broker_group]
