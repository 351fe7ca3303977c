"""Heartbeats of ordered consumers to the meta server, which replies with their shares.

One heartbeat names all members with one client id. The meta server holds its reply until there is a change, or for
``heartbeat_seconds``. While no meta server is reachable, allocations stay as they are (R16).
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

#: After this many missed heartbeats the lease renewer's thread sends them.
LATE_HEARTBEATS = 3


class GroupMember(Protocol):
    """An ordered consumer or one with affinity, as a member of its group."""

    subject: str
    client_id: str
    affinity: bool
    #: True if the member creates its subject when it does not exist.
    creates: bool

    @property
    def group_name(self) -> str:
        """The name of the member's group."""

    def overdue(self) -> bool:
        """True if the user has held a message for too long: other members must take over this member's share."""

    def is_overdue(self) -> bool:
        """Like ``overdue``, without side effects; may be called from any thread."""

    def allocated(self, strategy: str, grants: list[m.LpGrant]) -> None:
        """Use the LPs that the meta server has allocated to the member."""

    def fail(self, error: PlaitError) -> None:
        """Fail the member, which the meta server has refused permanently."""


class MemberHeartbeats:
    """The heartbeats of all members of one client."""

    def __init__(self, router: Router, limits: ClientLimits, now: Callable[[], float]) -> None:
        self._router = router
        self._limits = limits
        self._now = now
        self._loops: dict[str, _HeartbeatLoop] = {}
        #: Distinguishes this process from another one with the same client id.
        self._instance = chance.bits(63) | 1

    async def join(self, member: GroupMember) -> None:
        """Add a member; returns when it has its share, or raises the reason why it cannot join."""
        heartbeats = self._loops.get(member.client_id)
        if heartbeats is None:
            heartbeats = _HeartbeatLoop(member.client_id, self._instance, self._router, self._limits, self._now)
            self._loops[member.client_id] = heartbeats
        limit = self._limits.request_seconds
        try:
            async with asyncio.timeout(limit):
                await heartbeats.join(member)
        except TimeoutError:
            # ``forget``, not ``leave``: that would wait for a meta server a second time.
            heartbeats.forget(member)
            refusal = heartbeats.refusals.get((member.subject, member.group_name))
            if refusal is None:
                raise Unavailable(f"no meta server answered within {limit:g} s") from None
            if isinstance(refusal, GroupBusy):
                raise refusal from None
            group = f"group {member.group_name!r} of {member.subject!r}"
            raise Unavailable(f"{group} could not be joined within {limit:g} s: {refusal}") from None

    async def leave(self, member: GroupMember) -> None:
        """Remove a member; returns when the meta server has acknowledged it, or after ``request_seconds``.

        No effect if the member has left or never joined, even if another member of the same group has its place.
        """
        heartbeats = self._loops.get(member.client_id)
        if heartbeats is not None:
            with contextlib.suppress(TimeoutError, PlaitError):
                async with asyncio.timeout(self._limits.request_seconds):
                    await heartbeats.leave(member)
            await heartbeats.stop_unused()
            if heartbeats.unused and self._loops.get(member.client_id) is heartbeats:
                del self._loops[member.client_id]

    def late(self) -> list[m.MemberHeartbeatRequest]:
        """The heartbeats that are overdue because the user's loop is busy. May be called from any thread."""
        oldest = self._now() - LATE_HEARTBEATS * self._limits.heartbeat_seconds
        return [heartbeats.liveness() for heartbeats in list(self._loops.values()) if heartbeats.sent < oldest]

    @property
    def addresses(self) -> list[str]:
        return self._router.meta.addresses

    def ask_again(self, member: GroupMember) -> None:
        """Ask for the member's share again: the one it has is out of date."""
        heartbeats = self._loops.get(member.client_id)
        if heartbeats is not None:
            heartbeats.poke()


class _HeartbeatLoop:
    """The heartbeats of the members with one client id."""

    def __init__(
        self, client: str, instance: int, router: Router, limits: ClientLimits, now: Callable[[], float]
    ) -> None:
        self._now = now
        self._instance = instance
        #: The time of the last reply.
        self.sent = now()
        self._client = client
        self._router = router
        self._limits = limits
        #: By (subject, group).
        self.members: dict[tuple[str, str], GroupMember] = {}
        self._task: asyncio.Task[None] | None = None
        self._poked = asyncio.Event()
        #: The newest change number received.
        self._seen = 0
        #: The number of changes of ``members``, and the callers that wait until the meta server has one of them.
        self._changes = 0
        self._waiting: list[tuple[int, GroupKey, asyncio.Future[None]]] = []
        self._refreshing: set[asyncio.Task[None]] = set()
        #: Members that the last reply refused, and why.
        self.refusals: dict[GroupKey, PlaitError] = {}

    async def join(self, member: GroupMember) -> None:
        self.members[member.subject, member.group_name] = member
        await self._wait_known((member.subject, member.group_name))

    def forget(self, member: GroupMember) -> bool:
        """Remove a member; returns False if it is not there. Another member in its place stays."""
        key = (member.subject, member.group_name)
        if self.members.get(key) is not member:
            return False
        del self.members[key]
        return True

    async def leave(self, member: GroupMember) -> None:
        if self.forget(member):
            await self._wait_known((member.subject, member.group_name))

    @property
    def unused(self) -> bool:
        """True if there is no member, and the meta server need not learn that another one has left."""
        return not self.members and all(future.done() for _, _, future in self._waiting)

    async def stop_unused(self) -> None:
        """End the heartbeats if they are not used. A member that joins meanwhile starts a new task."""
        task = self._task
        if self.unused and task is not None:
            self._task = None
            task.cancel()
            await asyncio.wait([task])

    async def _wait_known(self, key: GroupKey) -> None:
        """Wait until the meta server has the current members, or refuses this one."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self.poke()
        self._waiting.append((self._changes, key, future))
        if self._task is None or self._task.done() or self._task.cancelling():
            self._task = tasks.keep(self._run, "plait-member-heartbeats")
        await future

    def poke(self) -> None:
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
                answer = await self._heartbeat()
            except PlaitError as error:
                if not error.retryable and not isinstance(error, InternalError):
                    for member in list(self.members.values()):
                        self._give_up(member, error)
                    # Fail the callers of ``leave`` too: the next heartbeat would be refused as well.
                    self._complete([future for _, _, future in self._waiting], error)
                    continue
                log.info("no reply to the heartbeat of client %s: %s", self._client, error)
                await self._rest(pause)
                pause = min(2 * pause, self._limits.reconnect_max_seconds)
                continue
            pause = self._limits.reconnect_first_seconds
            if answer is None:
                # Poked before the reply arrived: send the next heartbeat at once.
                continue
            news = answer.seen != self._seen
            self._apply(answer, changes)
            if not news or answer.refused:
                # Keep the pace when a meta server replies without a change, or refuses.
                await self._rest(self._limits.heartbeat_seconds - (loop.time() - begun))

    async def _heartbeat(self) -> m.MemberHeartbeatReply | None:
        """Send one heartbeat and return its reply; None: another heartbeat is due before the reply arrived."""
        wait = self._limits.heartbeat_seconds
        request = self._request({key: member for key, member in self.members.items() if not member.overdue()}, wait)
        asking = tasks.child(self._router.meta.request(request, wait + self._limits.request_seconds), "plait-heartbeat")
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

    def liveness(self) -> m.MemberHeartbeatRequest:
        """A heartbeat for the lease renewer's thread to send; its reply is ignored. May be called from any thread."""
        return self._request({key: member for key, member in list(self.members.items()) if not member.is_overdue()})

    def _request(self, members: dict[tuple[str, str], GroupMember], wait: float = 0.0) -> m.MemberHeartbeatRequest:
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

    def _apply(self, answer: m.MemberHeartbeatReply, changes: int) -> None:
        if changes == self._changes:
            self._seen = answer.seen
        refused = {(subject, group): from_code(code, text) for subject, group, code, text in answer.refused}
        before, self.refusals = self.refusals, refused
        taken = next((error for error in refused.values() if isinstance(error, GroupBusy)), None)
        if taken is not None and not any(isinstance(error, GroupBusy) for error in before.values()):
            log.warning("%s; until then this process is not a member of its groups", taken)
        for key, error in refused.items():
            if key in self.members:
                self._refused(self.members[key], error)
        for subject, group, strategy, grants in answer.members:
            member = self.members.get((subject, group))
            if member is not None and member.overdue():
                # Ask for the share again once the member is no longer overdue.
                self._seen = 0
            elif member is not None:
                member.allocated(strategy, grants)
        self._router.learn(answer.metas)
        for subject, version in answer.routes.items():
            known = self._router.known(subject)
            if known is not None and known.version < version:
                self._look_again(subject)
        done = [future for change, key, future in self._waiting if change <= changes and key not in refused]
        self._complete(done, None)

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
        """The meta server refused one member, temporarily or permanently. Other members are not affected."""
        if isinstance(error, SubjectNotFound):
            self._begin(self._make_again(member), f"plait-make-{member.subject}")
        elif isinstance(error, GroupBusy):
            # Another process uses the client id. It may end, so the next heartbeat tries again after a pause.
            pass
        elif error.retryable or isinstance(error, InternalError):
            log.info(
                "client %s cannot join group %r of %r yet: %s", self._client, member.group_name, member.subject, error
            )
        else:
            self._give_up(member, error)

    async def _make_again(self, member: GroupMember) -> None:
        """The subject was deleted. Create it again, or fail the member if subjects are not created on use."""
        try:
            await self._router.refresh(member.subject, create=member.creates)
        except SubjectNotFound as error:
            self._give_up(member, error)
        except PlaitError:
            # The next heartbeat is refused too, which tries again.
            pass
        else:
            self.poke()

    def _give_up(self, member: GroupMember, error: PlaitError) -> None:
        key = (member.subject, member.group_name)
        if self.forget(member):
            member.fail(error)
            self._complete([future for _, waiting, future in self._waiting if waiting == key], error)

    def _complete(self, done: list[asyncio.Future[None]], error: PlaitError | None) -> None:
        self._waiting = [entry for entry in self._waiting if entry[2] not in done]
        for future in done:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
