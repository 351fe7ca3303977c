"""Members of groups: heartbeats of clients, joins and leaves, and lost clients.

A heartbeat names all groups of a client. A group that is new in it is a join, and a group that is missing is a leave.
They are written at once; the new allocation follows later (``Allocator``). Most heartbeats repeat the client's previous
heartbeat. Any thread may answer these (``repeat``), so that they do not wait for decisions about other clients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import compress
from typing import NamedTuple

import msgspec

from plait.errors import LimitExceeded, PlaitError
from plait.meta.core import Core
from plait.meta.database.connection import ConcurrentChange
from plait.meta.database.mirror import Allocated, GroupKey, Mirror
from plait.meta.database.schema import MemberRow
from plait.meta.members.joining import Joining
from plait.meta.members.leaving import Leave, LeaveQueue
from plait.meta.members.liveness import Liveness
from plait.meta.members.shares import HeartbeatView, join
from plait.meta.members.shares import shared as shared_of
from plait.model import names
from plait.model.settings import GroupSettings

#: How long ``news`` waits while a change is applied to the mirror. That nearly always takes one or two milliseconds;
#: asking the deciding thread instead would take longer.
CHANGING_SECONDS = 0.003

#: (subject, group, ordered).
Membership = tuple[str, str, bool]


class _LastHeartbeat(NamedTuple):
    """The last heartbeat of a client. While its turn is current, an equal heartbeat changes nothing."""

    turn: int
    members: Sequence[Membership]
    affinity: Collection[GroupKey]


class _Groups(NamedTuple):
    """The groups of a client, in order. Valid while both turns are current."""

    turn: int
    route_turn: int
    exclusive: list[Allocated]
    #: Packed shares of the groups that are not ordered.
    shared: list[bytes]
    #: Subject → route version; and the change that made the newest of these routes.
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


#: What a client does not know yet: its groups; the change up to which it knows everything after the reply; the ordered
#: groups whose allocation it does not have.
_Newer = tuple[_Groups, int, list[Allocated]]


class Members:
    """The members of all groups."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._watch = Liveness(core, "c", core.limits.member_lost_seconds)
        #: The time up to which silence of clients was counted, on the monotonic clock.
        self._passed = core.clock.monotonic()
        #: By client, while it is a member of a group.
        self._last: dict[str, _LastHeartbeat] = {}
        self._groups: dict[str, _Groups] = {}
        #: The reply to a client that repeats its last heartbeat and knows everything.
        self._repeat_views: dict[str, HeartbeatView] = {}
        #: Clients answered by ``repeat``, with the time; the watch does not know these heartbeats yet.
        self._repeated: deque[tuple[str, float]] = deque()
        self.joining = Joining(core)
        self.leaving = LeaveQueue(core)
        self._flushed = 0.0
        #: True while heartbeat counts are exchanged with other meta servers, page by page.
        self._exchanging = False

    # --- heartbeats -----------------------------------------------------------------------------

    def heartbeat(
        self,
        client: str,
        members: Sequence[Membership],
        *,
        seen: int = 0,
        affinity: Collection[GroupKey] = (),
    ) -> HeartbeatView:
        """Answer a heartbeat: the client is a member of exactly these groups and knows all changes up to ``seen``.

        The reply has what is newer than ``seen``, the number of an earlier reply for the same members; everything if it
        is 0. Joins and leaves are written at once; the allocation that follows is computed later.
        """
        if self._core.down is not None:
            raise self._core.down
        names.check("client", client)
        self.leaving.end_of(client)
        mirror = self._core.mirror
        heartbeat = _LastHeartbeat(mirror.turn_of(client), members, affinity)
        refused: dict[GroupKey, PlaitError] = {}
        if heartbeat != self._last.get(client):
            refused = self._update_memberships(client, heartbeat)
        self._pass_time()
        if client in mirror.memberships:
            self._watch.notice(client)
        else:
            self._unwatch(client)
        return self._answer(client, refused, self._newer(client, seen))

    def repeat(
        self, client: str, members: Sequence[Membership], affinity: Collection[GroupKey], seen: int
    ) -> HeartbeatView | None:
        """Answer a heartbeat that repeats the client's last one. Returns None if ``heartbeat`` must answer it.

        Any thread may call this. A client whose memberships changed sends ``seen`` = 0, which is not answered here,
        because the change must be processed first. Nor is a heartbeat answered here if time was not counted for
        ``gap_seconds``: other meta servers may have given up the client meanwhile.
        """
        core, mirror = self._core, self._core.mirror
        now, turn = core.clock.monotonic(), mirror.turn_of(client)
        if (
            not seen
            or now - self._passed > core.limits.gap_seconds
            or self._last.get(client) != (turn, members, affinity)
        ):
            return None
        view = self.news(client, seen)
        if view is None or mirror.turn_of(client) != turn:
            return None
        self._repeated.append((client, now))
        return view

    def news(self, client: str, seen: int) -> HeartbeatView | None:
        """The result of ``known``, for any thread.

        Returns None if ``known`` must be called, because the mirror is changing or shares must be packed.
        """
        core, mirror, view = self._core, self._core.mirror, self._repeat_views.get(client)
        if core.down is not None:
            return None
        if view is not None and view.seen == seen:
            return view
        if not mirror.changing.acquire(timeout=CHANGING_SECONDS):
            return None
        try:
            newer = self._newer(client, seen)
            # Under the lock: the reply is recorded before the next change makes it outdated.
            return self._answer(client, {}, newer) if all(each.shares for each in newer[2]) else None
        finally:
            mirror.changing.release()

    def changed(self, clients: Iterable[str]) -> None:
        """Discard the recorded replies to these clients, because something changed for them."""
        for client in clients:
            self._repeat_views.pop(client, None)

    def _update_memberships(self, client: str, heartbeat: _LastHeartbeat) -> dict[GroupKey, PlaitError]:
        """Process a heartbeat that differs from the last one, or after changes by others.

        Returns refused memberships.
        """
        mirror, limit = self._core.mirror, self._core.limits.groups_per_client
        self._repeat_views.pop(client, None)
        affine = set(heartbeat.affinity)
        wanted = {
            (name, group): GroupSettings(ordered, (name, group) in affine) for name, group, ordered in heartbeat.members
        }
        if len(wanted) > limit:
            raise LimitExceeded(
                f"client {client!r} is a member of {len(wanted)} groups (limit {limit}, `groups_per_client`); "
                "use fewer groups per client or raise it",
                limit="groups_per_client",
                value=limit,
            )
        refused: dict[GroupKey, PlaitError] = {}
        if mirror.memberships.get(client, set()) != wanted.keys() or not self.joining.agree(wanted):
            refused = self._core.decide(lambda: self.joining.join(client, wanted))
        if refused or not wanted or not self.joining.agree(wanted):
            # The next heartbeat is processed in full: a group may have been deleted at the same moment.
            self._last.pop(client, None)
        else:
            self._last[client] = heartbeat._replace(turn=mirror.turn_of(client))
        return refused

    def leave(self, client: str) -> Leave:
        """Begin the leave of a client from all groups; ``leaving.carry_out`` writes it and ``left`` completes it."""
        if self._core.down is not None:
            raise self._core.down
        names.check("client", client)
        self._last.pop(client, None)
        self._repeat_views.pop(client, None)
        return self.leaving.begin(client)

    def left(self, leave: Leave) -> HeartbeatView:
        """Complete a leave. The client is no member afterwards, unless it joined again."""
        self.leaving.end(leave)
        self._pass_time()
        if leave.client not in self._core.mirror.memberships:
            self._unwatch(leave.client)
        return self._answer(leave.client, {}, self._newer(leave.client, 0))

    def _unwatch(self, client: str) -> None:
        if client in self._watch:
            self._forget([client])

    def known(self, client: str, seen: int = 0) -> HeartbeatView:
        """The shares and routes of a client that are newer than ``seen``, for its last heartbeat's groups."""
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
            # The client knows more than the database, which was restored from an older copy.
            seen = 0
        return groups, newest, [each for each in groups.exclusive if each.changed > seen]

    def _answer(self, client: str, refused: dict[GroupKey, PlaitError], newer: _Newer) -> HeartbeatView:
        groups, newest, allocated = newer
        if client in self._last:
            self._repeat_views[client] = HeartbeatView(newest, join(groups.shared), {}, groups.versions)
        shares = [(each.shares or self._core.mirror.shares(each.key)).of(client) for each in allocated]
        return HeartbeatView(newest, join([*groups.shared, *shares]), refused, groups.versions)

    # --- lost clients ---------------------------------------------------------------------------

    def _pass_time(self) -> None:
        """Count time up to now, so that silence is measured from the heartbeat itself and not from the last tick."""
        now = self._core.clock.monotonic()
        passed, self._passed = self._core.noticeable(now - self._passed), now
        self._watch.advance(passed)
        while self._repeated:
            client, at = self._repeated.popleft()
            if client in self._core.mirror.memberships:
                # Not before the last ``advance``: heartbeats must be recorded in order.
                self._watch.notice(client, min(max(now - at, 0.0), passed))

    @property
    def next_loss(self) -> float:
        """Seconds of further silence until the next client is lost."""
        return self._watch.next_loss

    def watch(self, seconds: float) -> None:
        """Called every tick, with the seconds that count as silence."""
        self._pass_time()
        for client in self._core.mirror.memberships:
            self._watch.expect(client)
        self._flushed += seconds
        if self._flushed >= self._core.limits.heartbeat_flush_seconds and not self._core.store.alone:
            self._flushed = 0.0
            self._exchanging = True

    def look(self) -> bool:
        """Exchange heartbeat counts with other meta servers and remove lost clients.

        Returns True if more is left to do.
        """
        self.leaving.take_in()
        self._pass_time()
        page = self._core.limits.page
        if self._exchanging:
            self._exchanging = self._watch.exchange()
        lost = self._watch.lost(page)
        given_up = self._give_up(lost) if lost else 0
        return self._exchanging or len(lost) == page or given_up < len(lost)

    def _give_up(self, silent: Sequence[str]) -> int:
        """Remove clients that were silent for a lease, as this meta server knows. Returns how many it processed.

        It stops at ``write_members`` memberships, because applying more would delay heartbeats.
        """
        core, mirror = self._core, self._core.mirror
        lost: list[str] = []
        rows: list[MemberRow] = []
        for client in silent:
            rows += [mirror.members[key][client] for key in sorted(mirror.memberships.get(client, ()))]
            lost.append(client)
            if len(rows) >= core.limits.write_members:
                break
        count = len(lost)
        if not rows:
            self._forget(lost)
            return count
        try:
            with core.change() as change:
                if not core.store.alone:
                    revived = self._watch.revived(change, lost)
                    rows = [row for row in rows if row.client not in revived]
                    lost = [client for client in lost if client not in revived]
                change.replace(*((row, msgspec.structs.replace(row, online=False)) for row in rows))
        except ConcurrentChange:
            # Another meta server removed them, or they joined again: the next ``look`` finds out.
            core.refresh()
            return count
        self._forget(lost)
        return count

    def _forget(self, clients: Sequence[str]) -> None:
        # Under the lock: another thread may be recording a reply to one of these clients.
        with self._core.mirror.changing:
            for client in clients:
                self._last.pop(client, None)
                self._groups.pop(client, None)
                self._repeat_views.pop(client, None)
        self._watch.forget(clients)
