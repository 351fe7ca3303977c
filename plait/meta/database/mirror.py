"""Everything that the database has, in a meta server's memory, as of one change.

The same method takes in what others have changed and what this server has, in the order of the changes; so what is
here is always the whole of some moment. One thread does that. Another one may look only while it holds ``changing``.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

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
    """What is new since somebody asked last, so that who waits for it can be told."""

    #: Subjects whose route is another one.
    subjects: set[str]
    #: Groups whose allocation is another one.
    groups: set[GroupKey]
    #: Broker groups whose state is another one.
    brokers: set[str]
    #: Clients that are members of those groups, or of any group of those subjects.
    clients: set[str]
    #: There is more to do at once.
    more: bool


class Allocated:
    """What heartbeats ask of an ordered group's allocation; the same object for as long as there is the group."""

    __slots__ = ("changed", "key", "shares")

    def __init__(self, key: GroupKey) -> None:
        self.key = key
        #: The change that made the allocation.
        self.changed = 0
        #: None: not packed yet.
        self.shares: Shares | None = None


class Packed(NamedTuple):
    """An allocation that was just written: there is no need to decode it, nor to pack it for heartbeats."""

    body: bytes
    allocation: Allocation
    shares: Shares


class Mirror:
    """All rows by key, and what is asked of them often."""

    def __init__(self) -> None:
        #: The last change that is in here; -1: nothing is.
        self.seen = -1
        #: Held while something changes; never while the database is asked.
        self.changing = threading.Lock()
        self.new_subjects: set[str] = set()
        self.new_groups: set[GroupKey] = set()
        self.new_brokers: set[str] = set()
        self._turn = 0
        #: Counts changes of routes.
        self.route_turn = 0
        self._clear()

    def _clear(self) -> None:
        #: When something changed for all clients, and when for each of them; see ``turn_of``.
        self._turn_of_all = self._next_turn()
        self._turns: dict[str, int] = {}
        self.brokers: dict[str, dict[str, BrokerRow]] = defaultdict(dict)
        self.subjects: dict[str, SubjectRow] = {}
        self.routes: dict[str, RouteRow] = {}
        self.partitions: dict[PartitionId, PartitionAssignment] = {}
        self.partitions_of: dict[str, set[PartitionId]] = defaultdict(set)
        #: How many partitions each broker group has.
        self.load: dict[str, int] = defaultdict(int)
        self.groups: dict[GroupKey, GroupRow] = {}
        self.groups_of: dict[str, set[str]] = defaultdict(set)
        self.settings: dict[GroupKey, GroupSettings] = {}
        self.allocations: dict[GroupKey, AllocationRow] = {}
        self.allocated: dict[GroupKey, Allocated] = {}
        #: Members that are online, of each group and of each client.
        self.members: dict[GroupKey, dict[str, MemberRow]] = defaultdict(dict)
        self.memberships: dict[str, set[GroupKey]] = defaultdict(set)
        #: Members that have left and are still in the database.
        self.left: dict[tuple[str, str, str], MemberRow] = {}
        #: The last change of each group's members.
        self.touched: dict[GroupKey, int] = defaultdict(int)
        #: Groups whose allocation may be older than their members, the longest waiting first.
        self.stale: dict[GroupKey, None] = {}
        #: Subjects whose route or partitions have changed since ``Routing`` looked at them.
        self.unsettled: set[str] = set()
        self.dropping: set[PartitionId] = set()
        self._decoded: dict[GroupKey, Allocation] = {}

    def take(self, news: News, packed: Mapping[GroupKey, Packed]) -> None:
        """What the database had to say."""
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
        """The change is the next one: nothing of others came between."""
        return change.number == self.seen + 1

    def take_own(self, change: StoreChange, packed: Mapping[GroupKey, Packed]) -> None:
        """What this server has changed, if nothing of others came between."""
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

    def is_taken(self, place: PartitionId) -> bool:
        """There is such a partition, or it is not certain yet that there is none any more."""
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
        """The allocation as members hear of it."""
        allocated = self.allocated[key]
        if allocated.shares is None:
            allocated.shares = Shares(*key, self.allocation(key))
        return allocated.shares

    def turn_of(self, client: str) -> int:
        """Another number than before: what a client is a member of, or what a group is like, may have changed.

        From any thread.
        """
        return max(self._turn_of_all, self._turns.get(client, 0))

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def clients_of(self, subjects: Iterable[str], groups: Iterable[GroupKey]) -> set[str]:
        """Members of those groups and of all groups of those subjects."""
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
                self.subjects[row.name] = row
                self.new_subjects.add(row.name)
                self.unsettled.add(row.name)
            case GroupRow():
                self._touch_members((row.subject, row.name))
                self.groups[row.subject, row.name] = row
                self.settings[row.subject, row.name] = group_settings(row.settings)
                self.groups_of[row.subject].add(row.name)
            case BrokerRow():
                self.brokers[row.broker_group][row.broker] = row
                self.new_brokers.add(row.broker_group)

    def _touch_members(self, key: GroupKey) -> None:
        """Their group is another one: what they said of it is to be looked at again."""
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
        """In one go with the rows: heartbeats find them packed."""
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
                    # Not the number that it had before.
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
