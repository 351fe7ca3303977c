"""Membership of ordered consumers: a client tells the meta server that it lives, and hears what is its to handle.

One heartbeat names all members that go by one id. Its answer waits at the meta server until there is something new, or
a second is over. Without a meta server allocations stay as they are (R16).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from plait import chance, tasks
from plait.client.net.router import Router
from plait.errors import GroupBusy, InternalError, PlaitError, SubjectNotFound, Unavailable, from_code
from plait.limits import ClientLimits
from plait.wire import messages as m

log = logging.getLogger("plait.client")

#: (subject, group).
GroupKey = tuple[str, str]

#: After so many heartbeats that did not leave they are sent from elsewhere.
LATE_BEATS = 3


class GroupMember(Protocol):
    """An ordered consumer, or one with affinity."""

    subject: str
    client_id: str
    affinity: bool

    @property
    def group_name(self) -> str:
        """The group that it is a member of."""

    def overdue(self) -> bool:
        """The user has had a message for too long: others are to handle what is allocated to it."""

    def too_long(self) -> bool:
        """The same, from any thread."""

    def allocated(self, strategy: str, grants: list[m.LpGrant]) -> None:
        """What the meta server says."""

    def give_up(self, error: PlaitError) -> None:
        """It cannot be a member."""


class MemberHeartbeats:
    """The members of one client."""

    def __init__(self, router: Router, limits: ClientLimits, now: Callable[[], float]) -> None:
        self._router = router
        self._limits = limits
        self._now = now
        self._beats: dict[str, _HeartbeatLoop] = {}
        #: Tells this process from another one with the same client id.
        self._instance = chance.bits(63) | 1

    async def join(self, member: GroupMember) -> None:
        """Become a member; returns when it knows what is its to handle, or raises why it cannot."""
        beats = self._beats.get(member.client_id)
        if beats is None:
            beats = _HeartbeatLoop(member.client_id, self._instance, self._router, self._limits, self._now)
            self._beats[member.client_id] = beats
        limit = self._limits.request_seconds
        try:
            async with asyncio.timeout(limit):
                await beats.join(member)
        except TimeoutError:
            # No meta server is waited for a second time, to leave.
            beats.forget(member)
            refusal = beats.refusals.get((member.subject, member.group_name))
            if refusal is None:
                raise Unavailable(f"no meta server answered within {limit:g} s") from None
            if isinstance(refusal, GroupBusy):
                raise refusal from None
            group = f"group {member.group_name!r} of {member.subject!r}"
            raise Unavailable(f"{group} could not be joined within {limit:g} s: {refusal}") from None

    async def leave(self, member: GroupMember) -> None:
        """Stop being one; returns when the meta server knows, or when it takes too long.

        A member that left before, or never joined, changes nothing for another one in its place.
        """
        beats = self._beats.get(member.client_id)
        if beats is not None:
            with contextlib.suppress(TimeoutError, PlaitError):
                async with asyncio.timeout(self._limits.request_seconds):
                    await beats.leave(member)
            await beats.stop_without_members()
            if not beats.members and self._beats.get(member.client_id) is beats:
                del self._beats[member.client_id]

    def late(self) -> list[m.MemberHeartbeatRequest]:
        """Heartbeats that are overdue because the user's loop is busy. From any thread."""
        oldest = self._now() - LATE_BEATS * self._limits.heartbeat_seconds
        return [beats.again() for beats in list(self._beats.values()) if beats.sent < oldest]

    @property
    def addresses(self) -> list[str]:
        """Where the meta servers are."""
        return self._router.meta.addresses

    def ask_again(self, member: GroupMember) -> None:
        """What it was told is out of date."""
        beats = self._beats.get(member.client_id)
        if beats is not None:
            beats.poke()


class _HeartbeatLoop:
    """The heartbeats of members with one id."""

    def __init__(
        self, client: str, instance: int, router: Router, limits: ClientLimits, now: Callable[[], float]
    ) -> None:
        self._now = now
        self._instance = instance
        #: When the last heartbeat was answered.
        self.sent = now()
        self._client = client
        self._router = router
        self._limits = limits
        #: By (subject, group).
        self.members: dict[tuple[str, str], GroupMember] = {}
        self._task: asyncio.Task[None] | None = None
        self._poked = asyncio.Event()
        #: The newest that was heard.
        self._seen = 0
        #: Changes so far, and callers that wait for one of them, of one membership, to be known to the meta server.
        self._changes = 0
        self._waiting: list[tuple[int, GroupKey, asyncio.Future[None]]] = []
        self._refreshing: set[asyncio.Task[None]] = set()
        #: Memberships that the last answer refused, and why.
        self.refusals: dict[GroupKey, PlaitError] = {}

    async def join(self, member: GroupMember) -> None:
        self.members[member.subject, member.group_name] = member
        await self._known((member.subject, member.group_name))

    def forget(self, member: GroupMember) -> bool:
        """Name this member no longer; whether it was named. Another one in its place stays."""
        key = (member.subject, member.group_name)
        if self.members.get(key) is not member:
            return False
        del self.members[key]
        return True

    async def leave(self, member: GroupMember) -> None:
        if self.forget(member):
            await self._known((member.subject, member.group_name))

    async def stop_without_members(self) -> None:
        """End the heartbeats, unless there is a member. One that joins meanwhile starts others."""
        task = self._task
        if not self.members and task is not None:
            self._task = None
            task.cancel()
            await asyncio.wait([task])

    async def _known(self, key: GroupKey) -> None:
        """Until the meta server knows of the members as they are, or refuses this one."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self.poke()
        self._waiting.append((self._changes, key, future))
        if self._task is None or self._task.done() or self._task.cancelling():
            self._task = tasks.keep(self._run, "plait-membership")
        await future

    def poke(self) -> None:
        """Beat now, and hear all there is."""
        self._changes += 1
        self._seen = 0
        self._poked.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause = self._limits.reconnect_first_seconds
        while self.members or self._waiting:
            self._poked.clear()
            begun, changes = loop.time(), self._changes
            try:
                answer = await self._beat()
            except PlaitError as error:
                if not error.retryable and not isinstance(error, InternalError):
                    for member in list(self.members.values()):
                        self._give_up(member, error)
                    # Those that wait to leave: the next heartbeat would be refused, too.
                    self._settle([future for _, _, future in self._waiting], error)
                    continue
                log.info("no answer to the heartbeat of %s: %s", self._client, error)
                await self._rest(pause)
                pause = min(2 * pause, self._limits.reconnect_max_seconds)
                continue
            pause = self._limits.reconnect_first_seconds
            if answer is None:
                # There is something to say before the answer came.
                continue
            news = answer.seen != self._seen
            self._heard(answer, changes)
            if not news or answer.refused:
                # A meta server that answers too soon is not asked all the time.
                await self._rest(self._limits.heartbeat_seconds - (loop.time() - begun))

    async def _beat(self) -> m.MemberHeartbeatReply | None:
        """One heartbeat and its answer; None: another one is due before it came."""
        wait = self._limits.heartbeat_seconds
        beat = self._saying({key: member for key, member in self.members.items() if not member.overdue()}, wait)
        asking = tasks.child(self._router.meta.request(beat, wait + self._limits.request_seconds), "plait-beat")
        poked = tasks.child(self._poked.wait(), "plait-poked")
        try:
            await asyncio.wait([asking, poked], return_when=asyncio.FIRST_COMPLETED)
            answer: m.MemberHeartbeatReply | None = asking.result() if asking.done() else None
            if answer is not None:
                self.sent = self._now()
        finally:
            poked.cancel()
            asking.cancel()
            await asyncio.gather(asking, poked, return_exceptions=True)
        return answer

    def again(self) -> m.MemberHeartbeatRequest:
        """Only that they live, from any thread: what there is to hear waits for the user's loop."""
        return self._saying({key: member for key, member in list(self.members.items()) if not member.too_long()})

    def _saying(self, members: dict[tuple[str, str], GroupMember], wait: float = 0.0) -> m.MemberHeartbeatRequest:
        affinity = [key for key, member in members.items() if member.affinity]
        named = [(*key, True) for key in members]
        return m.MemberHeartbeatRequest(
            self._client,
            named,
            self._seen,
            wait,
            leaving=not named,
            affinity=affinity,
            instance=self._instance,
        )

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(seconds, 0)):
                await self._poked.wait()
        except TimeoutError:
            pass

    def _heard(self, answer: m.MemberHeartbeatReply, changes: int) -> None:
        if changes == self._changes:
            self._seen = answer.seen
        refused = {(subject, group): from_code(code, text) for subject, group, code, text in answer.refused}
        before, self.refusals = self.refusals, refused
        taken = next((error for error in refused.values() if isinstance(error, GroupBusy)), None)
        if taken is not None and not any(isinstance(error, GroupBusy) for error in before.values()):
            log.warning("%s; until then this one is no member of its groups", taken)
        for key, error in refused.items():
            if key in self.members:
                self._refused(self.members[key], error)
        for subject, group, strategy, grants in answer.members:
            member = self.members.get((subject, group))
            if member is not None and member.overdue():
                # It is told of this once more when it is a member again.
                self._seen = 0
            elif member is not None:
                member.allocated(strategy, grants)
        self._router.learn(answer.metas)
        for subject, version in answer.routes.items():
            known = self._router.known(subject)
            if known is not None and known.version < version:
                self._look_again(subject)
        told = [future for change, key, future in self._waiting if change <= changes and key not in refused]
        self._settle(told, None)

    def _look_again(self, subject: str) -> None:
        async def refresh() -> None:
            with contextlib.suppress(PlaitError):
                await self._router.refresh(subject)

        self._begin(refresh(), f"plait-refresh-{subject}")

    def _begin(self, job: Coroutine[Any, Any, None], name: str) -> None:
        task = tasks.start(job, name)
        self._refreshing.add(task)
        task.add_done_callback(self._refreshing.discard)

    def _refused(self, member: GroupMember, error: PlaitError) -> None:
        """One membership cannot be, for the time being or at all. It costs the others nothing."""
        if isinstance(error, SubjectNotFound):
            self._begin(self._make_again(member), f"plait-make-{member.subject}")
        elif isinstance(error, GroupBusy):
            # Another process has the client id. It may end: the next heartbeat asks again, after a pause.
            pass
        elif error.retryable or isinstance(error, InternalError):
            log.info("%s cannot join group %r of %r yet: %s", self._client, member.group_name, member.subject, error)
        else:
            self._give_up(member, error)

    async def _make_again(self, member: GroupMember) -> None:
        """A subject was deleted: its consumers make it again, or end where subjects are not made by use."""
        try:
            await self._router.refresh(member.subject)
        except SubjectNotFound as error:
            self._give_up(member, error)
        except PlaitError:
            # The next heartbeat is refused, too.
            pass
        else:
            self.poke()

    def _give_up(self, member: GroupMember, error: PlaitError) -> None:
        key = (member.subject, member.group_name)
        if self.forget(member):
            member.give_up(error)
            self._settle([future for _, waiting, future in self._waiting if waiting == key], error)

    def _settle(self, told: list[asyncio.Future[None]], error: PlaitError | None) -> None:
        """These have waited long enough."""
        self._waiting = [entry for entry in self._waiting if entry[2] not in told]
        for future in told:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
