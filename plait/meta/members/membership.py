"""Members of groups: who is there, and which logical partitions each is to handle.

A heartbeat names all groups that a client is a member of; the difference to what is known are joins and leaves. They
are written down at once; the new allocation follows (``Allocating``). Most heartbeats say what the one before said: any
thread may answer those (``repeat``), so that they wait for nobody's decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import compress
from typing import NamedTuple

import msgspec

from plait.errors import GroupBusy, GroupMismatch, GroupNotFound, LimitExceeded, PlaitError, SubjectNotFound
from plait.meta.core import Core
from plait.meta.database.connection import ConcurrentChange
from plait.meta.database.mirror import Allocated, GroupKey, Mirror
from plait.meta.database.schema import AllocationRow, GroupRow, MemberRow
from plait.meta.database.store import StoreChange
from plait.meta.members.allocation import nobody
from plait.meta.members.leaving import Leave, LeaveQueue
from plait.meta.members.liveness import Liveness
from plait.meta.members.shares import join, split
from plait.meta.members.shares import shared as shared_of
from plait.meta.views import AllocationView, HeartbeatView
from plait.model import names
from plait.model.settings import GroupSettings, group_settings, text_of

#: Names of clients among those whose heartbeats are counted.
_PREFIX = "c/"
_PREFIX_END = "c0"

#: A change is taken in within a millisecond or two, nearly always: who asks meanwhile waits for that, as it would wait
#: longer for the thread that does it.
CHANGING_SECONDS = 0.003

#: (subject, group, ordered).
Membership = tuple[str, str, bool]


class _LastHeartbeat(NamedTuple):
    """What a client said last. It need not be looked at again for as long as nothing changes by others."""

    turn: int
    members: Sequence[Membership]
    affinity: Collection[GroupKey]

    def settings(self) -> dict[GroupKey, GroupSettings]:
        affine = set(self.affinity)
        return {(name, group): GroupSettings(ordered, (name, group) in affine) for name, group, ordered in self.members}


class _Groups(NamedTuple):
    """What a client is a member of, in order, as long as none of the turns is another one."""

    turn: int
    route_turn: int
    exclusive: list[Allocated]
    #: Shares.
    shared: list[bytes]
    #: Subject → version of its route, and the change that made the newest.
    versions: dict[str, int]
    routed: int

    @classmethod
    def of(cls, mirror: Mirror, client: str) -> _Groups:
        keys = sorted(mirror.memberships.get(client, ()))
        ordered = [mirror.settings[key].ordered for key in keys]
        routes = [mirror.routes[subject] for subject in sorted({subject for subject, _ in keys})]
        return cls(
            mirror.turn_of(client),
            mirror.route_turn,
            [mirror.allocated[key] for key in compress(keys, ordered)],
            [shared_of(*key) for key, exclusive in zip(keys, ordered, strict=True) if not exclusive],
            {route.subject: route.version for route in routes},
            max((route.changed for route in routes), default=0),
        )


class _Newer(NamedTuple):
    """What a client has not heard yet."""

    groups: _Groups
    #: The change that it has heard all up to once it is told.
    newest: int
    #: Ordered groups with another allocation.
    allocated: list[Allocated]


class Members:
    """The members of all groups."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._watch = Liveness(core.limits.member_lost_seconds)
        #: Up to when the watch has counted.
        self._passed = core.clock.monotonic()
        #: Heard of since their counters were written.
        self._heard: dict[str, None] = {}
        #: By client, as long as it is a member of something.
        self._said: dict[str, _LastHeartbeat] = {}
        self._groups: dict[str, _Groups] = {}
        #: What is to be said to a client that says the same again and has heard all there is.
        self._told: dict[str, HeartbeatView] = {}
        #: Who was answered by ``repeat``, and when; not yet known to the watch.
        self._repeated: deque[tuple[str, float]] = deque()
        self._leaving = LeaveQueue(core)
        self._flushed = 0.0
        #: Counters of clients are read behind this name; "": all are read.
        self._reading = ""

    # --- heartbeats -----------------------------------------------------------------------------

    def beat(
        self,
        client: str,
        members: Sequence[Membership],
        *,
        seen: int = 0,
        leaving: bool = False,
        affinity: Collection[GroupKey] = (),
    ) -> HeartbeatView:
        """A client lives and is a member of these groups, and of no others; it has heard all up to ``seen``."""
        if leaving:
            return self.left(self.leave(client))
        if self._core.down is not None:
            raise self._core.down
        names.check("client", client)
        self._leaving.end_of(client)
        mirror = self._core.mirror
        said = _LastHeartbeat(mirror.turn_of(client), members, affinity)
        refused: dict[GroupKey, PlaitError] = {}
        if said != self._said.get(client):
            refused = self._hear(client, said)
        self._pass_time()
        if client in mirror.memberships:
            self._note(client)
        else:
            self._is_out(client)
        return self._answer(client, refused, self._newer(client, seen))

    def repeat(
        self, client: str, members: Sequence[Membership], affinity: Collection[GroupKey], seen: int
    ) -> HeartbeatView | None:
        """The answer to a heartbeat that says nothing new; None: ask ``beat``.

        From any thread. Who has said something else meanwhile asks for all there is, which is not answered here: that
        is heard first. Where nobody has looked for long, this server may be the only one that thinks the client lives.
        """
        core, mirror = self._core, self._core.mirror
        now, turn = core.clock.monotonic(), mirror.turn_of(client)
        if (
            not seen
            or now - self._passed > core.limits.gap_seconds
            or self._said.get(client) != (turn, members, affinity)
        ):
            return None
        beaten = self.news(client, seen)
        if beaten is None or mirror.turn_of(client) != turn:
            return None
        self._repeated.append((client, now))
        return beaten

    def news(self, client: str, seen: int) -> HeartbeatView | None:
        """What ``known`` says, from any thread; None: ask ``known``, as something changes, or is to be packed."""
        core, mirror, told = self._core, self._core.mirror, self._told.get(client)
        if core.down is not None:
            return None
        if told is not None and told.seen == seen:
            return told
        if not mirror.changing.acquire(timeout=CHANGING_SECONDS):
            return None
        try:
            newer = self._newer(client, seen)
            # What is told is noted before the next change, by which it is out of date.
            return self._answer(client, {}, newer) if all(each.shares for each in newer.allocated) else None
        finally:
            mirror.changing.release()

    def changed(self, clients: Iterable[str]) -> None:
        """There is something new to tell them."""
        for client in clients:
            self._told.pop(client, None)

    def _hear(self, client: str, said: _LastHeartbeat) -> dict[GroupKey, PlaitError]:
        """A client says something else than before, or others may have; what it cannot be a member of, and why."""
        mirror, limit = self._core.mirror, self._core.limits.groups_per_client
        self._told.pop(client, None)
        wanted = said.settings()
        if len(wanted) > limit:
            raise LimitExceeded(
                f"client {client!r} is a member of {len(wanted)} groups, the limit is {limit}",
                limit="groups_per_client",
                value=limit,
            )
        refused: dict[GroupKey, PlaitError] = {}
        if mirror.memberships.get(client, set()) != wanted.keys() or not self._agree(wanted):
            refused = self._core.decide(lambda: self._join(client, wanted))
        if refused or not wanted or not self._agree(wanted):
            # The next heartbeat is looked at again: what it joined may have been deleted at the same moment.
            self._said.pop(client, None)
        else:
            self._said[client] = said._replace(turn=mirror.turn_of(client))
        return refused

    def leave(self, client: str) -> Leave:
        """A client leaves all groups: to be written (``carry_out``), and then told to ``left``."""
        if self._core.down is not None:
            raise self._core.down
        names.check("client", client)
        self._said.pop(client, None)
        self._told.pop(client, None)
        return self._leaving.begin(client)

    def carry_out(self, leave: Leave) -> None:
        """Write a leave, with others that wait. Any thread may do this, one at a time."""
        self._leaving.carry_out(leave)

    def left(self, leave: Leave) -> HeartbeatView:
        """The client is no member any more, unless it has become one again."""
        self._leaving.end(leave)
        self._pass_time()
        if leave.client not in self._core.mirror.memberships:
            self._is_out(leave.client)
        return self._answer(leave.client, {}, self._newer(leave.client, 0))

    def _note(self, client: str, ago: float = 0.0) -> None:
        """It lives, and has said so so many seconds ago."""
        who = _PREFIX + client
        self._watch.hear(who, ago)
        self._heard[who] = None

    def _is_out(self, client: str) -> None:
        if _PREFIX + client in self._watch:
            self._forget([_PREFIX + client])

    def known(self, client: str, seen: int = 0) -> HeartbeatView:
        """What is a client's, by what it said last, and newer than ``seen``."""
        if self._core.down is not None:
            raise self._core.down
        return self._answer(client, {}, self._newer(client, seen))

    def _newer(self, client: str, seen: int) -> _Newer:
        mirror = self._core.mirror
        groups = self._groups.get(client)
        if groups is None or groups[:2] != (mirror.turn_of(client), mirror.route_turn):
            groups = _Groups.of(mirror, client)
            if client in mirror.memberships:
                self._groups[client] = groups
        newest = max([groups.routed, *(each.changed for each in groups.exclusive)])
        if newest < seen:
            # The database is an older copy of what the client has heard of.
            seen = 0
        return _Newer(groups, newest, [each for each in groups.exclusive if each.changed > seen])

    def _answer(self, client: str, refused: dict[GroupKey, PlaitError], newer: _Newer) -> HeartbeatView:
        groups, newest, allocated = newer
        if client in self._said:
            self._told[client] = HeartbeatView(newest, join(groups.shared), {}, groups.versions)
        shares = [(each.shares or self._core.mirror.shares(each.key)).of(client) for each in allocated]
        return HeartbeatView(newest, join([*groups.shared, *shares]), refused, groups.versions)

    def _agree(self, wanted: dict[GroupKey, GroupSettings]) -> bool:
        """All groups are there, and are as the client says."""
        mirror = self._core.mirror
        return all(
            mirror.settings.get(key) == settings and not mirror.groups[key].deleted and mirror.subject(key[0])
            for key, settings in wanted.items()
        )

    def _join(self, client: str, wanted: dict[GroupKey, GroupSettings]) -> dict[GroupKey, PlaitError]:
        """Write down what is new; what cannot be, and why."""
        mirror = self._core.mirror
        known = mirror.memberships.get(client, set())
        refused: dict[GroupKey, PlaitError] = {}
        new_groups: list[GroupRow] = []
        for key, settings in wanted.items():
            try:
                if not self._admit(key, settings, len(new_groups), joins=key not in known):
                    new_groups.append(GroupRow(*key, text_of(settings)))
            except PlaitError as error:
                # Only this membership is refused: its client goes on with the others.
                error.details.update(subject=key[0], group=key[1])
                refused[key] = error
        joins = [key for key in wanted if key not in known and key not in refused]
        leaves = [key for key in known if key not in wanted or key in refused]
        if joins or leaves:
            with self._core.change() as change:
                self._found(change, new_groups)
                change.put(
                    *(MemberRow(*key, client, online=True) for key in joins),
                    *(MemberRow(*key, client, online=False) for key in leaves),
                )
        return refused

    def _admit(self, key: GroupKey, settings: GroupSettings, founded: int, *, joins: bool) -> bool:
        """The client may be a member; False: the group has to be founded."""
        mirror, limits = self._core.mirror, self._core.limits
        subject, name = key
        names.check("subject", subject)
        names.check_group(name)
        if mirror.subject(subject) is None:
            raise SubjectNotFound(
                f"subject {subject!r} does not exist; create it with 'plait subject create {subject}'", subject=subject
            )
        group = mirror.groups.get(key)
        if group is None or group.deleted:
            if len(mirror.groups) + founded >= limits.groups:
                raise LimitExceeded(
                    f"this cluster has its {limits.groups} groups; delete some or raise the limit",
                    limit="groups",
                    value=limits.groups,
                )
            return False
        if mirror.settings[key] != settings:
            raise GroupMismatch(
                f"group {name!r} of subject {subject!r} has {mirror.settings[key]}, this member {settings}",
                subject=subject,
                group=name,
                has=str(mirror.settings[key]),
                asked=str(settings),
            )
        if joins and len(mirror.members.get(key, ())) >= limits.members_per_group:
            raise LimitExceeded(
                f"group {name!r} of subject {subject!r} has its {limits.members_per_group} members",
                limit="members_per_group",
                value=limits.members_per_group,
            )
        return True

    def _found(self, change: StoreChange, groups: Sequence[GroupRow]) -> None:
        """New groups; one whose name was in use before goes on with higher epochs."""
        mirror = self._core.mirror
        before = [
            (mirror.groups[row.subject, row.name], row) for row in groups if (row.subject, row.name) in mirror.groups
        ]
        change.replace(*before)
        change.insert(*(row for row in groups if (row.subject, row.name) not in mirror.groups))
        number, body = change.number, nobody(change.number).encode()
        ordered = [row for row in groups if group_settings(row.settings).ordered]
        change.put(*(AllocationRow(row.subject, row.name, number, 0, body) for row in ordered))

    def forget_group(self, subject: str, name: str) -> None:
        """Delete a group without members; one of that name that comes later continues with higher epochs."""

        def decision() -> None:
            mirror, key = self._core.mirror, (subject, name)
            row = mirror.groups.get(key)
            if row is None or row.deleted:
                return
            if members := sorted(mirror.members.get(key, ())):
                named = ", ".join(members[:3])
                raise GroupBusy(
                    f"group {name!r} of {subject!r} has {names.counted(len(members), 'online consumer')} "
                    f"({named}); stop {'it' if len(members) == 1 else 'them'} first",
                    subject=subject,
                    group=name,
                    consumers=len(members),
                )
            with self._core.change() as change:
                change.replace((row, msgspec.structs.replace(row, deleted=True)))

        self._core.decide(decision)

    # --- who is lost ----------------------------------------------------------------------------

    def _pass_time(self) -> None:
        """Up to the moment: silence is counted from the very heartbeat, not from when was looked last."""
        now = self._core.clock.monotonic()
        passed, self._passed = self._core.noticeable(now - self._passed), now
        self._watch.advance(passed)
        while self._repeated:
            client, at = self._repeated.popleft()
            if client in self._core.mirror.memberships:
                # Not before the watch looked last: then it would not be in order.
                self._note(client, min(max(now - at, 0.0), passed))

    @property
    def next_loss(self) -> float:
        """After so many seconds of silence a client is lost."""
        return self._watch.next_loss

    def watch(self, seconds: float) -> None:
        """Time has passed under this server's eyes."""
        self._pass_time()
        for client in self._core.mirror.memberships:
            self._watch.expect(_PREFIX + client)
        self._flushed += seconds
        if self._flushed >= self._core.limits.beat_flush_seconds and not self._core.store.alone:
            self._flushed = 0.0
            self._reading = _PREFIX

    def look(self) -> bool:
        """Note who was heard here, see who was heard elsewhere, give up who was nowhere; whether there are more."""
        self._leaving.take_in()
        self._pass_time()
        page = self._core.limits.page
        if self._reading:
            self._exchange(page)
        lost = self._watch.lost(page)
        given_up = self._give_up(lost) if lost else 0
        return bool(self._reading) or len(lost) == page or given_up < len(lost)

    def _exchange(self, page: int) -> None:
        """Write a page of counters, and read one."""
        heard = list(self._heard)[:page]
        with self._core.noted():
            self._core.store.beat(heard)
            for who in heard:
                self._watch.raised(who)
            found = self._core.store.beats(self._reading, _PREFIX_END, page)
        for who in heard:
            del self._heard[who]
        for who, count in found:
            if who in self._watch:
                self._watch.see(who, count)
        if len(found) == page:
            self._reading = found[-1][0]
        elif not self._heard:
            self._reading = ""

    def _give_up(self, silent: Sequence[str]) -> int:
        """These were silent for a lease, as far as this meta server can tell; how many of them were seen to.

        The first ones, until they are members of so much that more would hold up heartbeats when it is known.
        """
        core, mirror = self._core, self._core.mirror
        lost: list[str] = []
        rows: list[MemberRow] = []
        for who in silent:
            client = who.removeprefix(_PREFIX)
            rows += [mirror.members[key][client] for key in sorted(mirror.memberships.get(client, ()))]
            lost.append(who)
            if len(rows) >= core.limits.write_members:
                break
        count = len(lost)
        if not rows:
            self._forget(lost)
            return count
        try:
            with core.change() as change:
                if not core.store.alone:
                    counts = change.beats(lost)
                    moved = {who for who in lost if counts.get(who) != self._watch.count(who)}
                    for who in moved:
                        self._watch.hear(who)
                    rows = [row for row in rows if _PREFIX + row.client not in moved]
                    lost = [who for who in lost if who not in moved]
                change.replace(*((row, msgspec.structs.replace(row, online=False)) for row in rows))
        except ConcurrentChange:
            # Somebody else gave them up, or they are back: the next look tells.
            core.refresh()
            return count
        self._forget(lost)
        return count

    def _forget(self, whos: Sequence[str]) -> None:
        for who in whos:
            self._watch.forget(who)
            self._heard.pop(who, None)
        # Who answers it in another thread at this moment notes what it was told.
        with self._core.mirror.changing:
            for client in (who.removeprefix(_PREFIX) for who in whos):
                self._said.pop(client, None)
                self._groups.pop(client, None)
                self._told.pop(client, None)
        if not self._core.store.alone:
            with self._core.noted():
                self._core.store.forget_beats(whos)

    # --- what is seen of them -------------------------------------------------------------------

    def view(self, subject: str, name: str) -> AllocationView:
        mirror, key = self._core.mirror, (subject, name)
        group = mirror.groups.get(key)
        if group is None or group.deleted:
            raise GroupNotFound(f"group {name!r} has never consumed subject {subject!r}", subject=subject, group=name)
        clients = sorted(mirror.members.get(key, ()))
        if not mirror.settings[key].ordered:
            return AllocationView(subject, name, "shared", 0, {client: [] for client in clients})
        shares = split(join([mirror.shares(key).of(client) for client in clients]))
        members = {client: share.lps for client, share in zip(clients, shares, strict=True)}
        return AllocationView(subject, name, "exclusive", mirror.allocation(key).epoch, members)
