"""Requests to a meta server: routes, heartbeats of clients and brokers, and the management of subjects.

Decisions run in another thread, so each request is a task. Its reply goes to the connection that it came from, if that
is still open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

from plait import tasks
from plait.errors import GroupBusy, InternalError, InvalidArgument, PlaitError, Unavailable
from plait.meta.members.shares import HeartbeatView
from plait.meta.recurring.definition import Definition
from plait.meta.route_changes import RouteView
from plait.meta.service import MetaService
from plait.model import names
from plait.model.route import PartitionId
from plait.model.settings import SubjectSettings
from plait.server.connection import Connection
from plait.server.listener import LOOPBACK
from plait.server.meta.meta_host import MetaHost
from plait.wire import messages as m
from plait.wire.admin import cluster as c
from plait.wire.admin import recurrences as r
from plait.wire.admin import subjects as g
from plait.wire.admin.operation import Operation, answer
from plait.wire.link import parse_address

log = logging.getLogger("plait.meta")

#: Unfinished batches in one reply. The client publishes them concurrently.
UNDONE_MAX = 4


class _IdOwner(NamedTuple):
    """The process that owns a client id.

    A heartbeat names all groups of a client id, so two processes with the same id would undo each other's memberships.
    The first process owns the id. Another process is refused until the first has left, its connection is closed, or it
    has sent no heartbeat for ``speaker_seconds``. So a restarted process can replace its predecessor.
    """

    instance: int
    last_heartbeat: float
    connection: Connection
    #: The instance that was refused last.
    refused: int = 0


class MetaHandlers:
    """Serves requests to a meta server."""

    def __init__(self, host: MetaHost) -> None:
        self._host = host
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False
        #: By client id, the longest silent first.
        self._id_owners: dict[str, _IdOwner] = {}
        #: Operations that are one decision, and how the host runs it.
        decisions: list[tuple[Operation[Any], Any, Callable[[MetaService, Any], Any]]] = [
            (g.CREATE_SUBJECT, host.choose, _create),
            (g.FORGET_GROUP, host.change, lambda s, r: s.forget_group(r.subject, r.group)),
            (g.GROUP_REMEMBERED, host.call, _remembered),
            (c.REGISTER_BROKER, host.change, _register),
            (c.BROKER_HEARTBEAT, host.call, lambda s, r: s.brokers.heartbeat(r.group, r.broker, r.state, r.reason)),
            (c.REPORT_PROGRESS, host.change, lambda s, r: s.retiring.report(r.group, r.broker, r.partitions)),
            (c.FORGET_BROKER, host.choose, lambda s, r: s.retiring.forget(r.group, lost=r.lost)),
            (c.SET_BROKER_STATE, host.change, lambda s, r: s.brokers.wish(r.group, r.state)),
            (c.LIST_BROKERS, host.call, _broker_groups),
            (c.DESCRIBE_BROKERS, host.call, lambda s, _: s.brokers.views()),
            (c.DESCRIBE_ALLOCATION, host.call, lambda s, r: s.allocator.view(r.subject, r.group)),
            (c.DECIDE_BATCH, host.call, lambda s, r: s.commits.decide(r.query, r.batch, r.stages)),
            (c.VETO_BATCH, host.call, lambda s, r: s.commits.veto(r.query, r.batch, r.producer)),
            (c.EXCHANGE_STAGES, host.call, lambda s, r: s.commits.exchange(r.query, r.batch, r.version, r.stages)),
            (c.BATCH_DONE, host.call, lambda s, r: s.commits.done(r.query, r.batch, r.version)),
            (r.SET_RECURRENCE, self._recur, lambda s, q: s.recurrences.set(q)),
            (r.PAUSE_RECURRENCE, self._recur, lambda s, q: s.recurrences.pause(q.name, paused=q.paused)),
            (r.REMOVE_RECURRENCE, self._recur, lambda s, q: s.recurrences.remove(q.name)),
            (r.DESCRIBE_RECURRENCE, host.call, lambda s, q: s.recurrences.describe(q.name)),
            (r.LIST_RECURRENCES, host.call, lambda s, q: s.recurrences.page(q)),
            (r.PREVIEW_FIRINGS, host.call, lambda s, q: s.recurrences.preview(q)),
            (c.UNDONE_BATCHES, host.call, lambda s, r: s.commits.undone(UNDONE_MAX, r.after)),
        ]
        self._decisions = {operation.name: (operation, run, decide) for operation, run, decide in decisions}
        others: list[tuple[Operation[Any], Callable[[Any], Awaitable[Any]]]] = [
            (g.MATCH_SUBJECTS, host.match_subjects),
            (g.SET_SUBJECT, lambda r: host.set_subject(r.subject, lambda s: s.subjects.update(r.subject, r.settings))),
            (g.PAUSE_GROUP, lambda r: host.set_subject(r.subject, partial(_pause, r))),
            (
                g.SET_RATE,
                lambda r: host.set_subject(r.subject, lambda s: s.subjects.set_rate(r.subject, r.group, r.rate)),
            ),
            (g.DELETE_SUBJECT, lambda r: host.delete_subject(r.subject)),
            (c.DESCRIBE_ROUTE, lambda r: self._route(r.subject)),
            (c.EXPAND_SUBJECT, self._expand),
            (r.CREATE_RECURRENCE, self._create_recurrence),
        ]
        self._others = {operation.name: (operation, call) for operation, call in others}

    def takes(self, message: m.PacketHead) -> bool:
        if isinstance(message, m.AdminRequest):
            return message.operation in self._decisions or message.operation in self._others
        return isinstance(message, m.RouteRequest | m.MemberHeartbeatRequest)

    def handle(self, connection: Connection, correlation: int, message: m.PacketHead) -> None:
        """Serve a request. The reply comes later, except for repeated heartbeats that do not wait."""
        if isinstance(message, m.MemberHeartbeatRequest) and (reply := self._at_once(connection, message)) is not None:
            connection.answer(correlation, reply)
            return
        connection.begin_poll(correlation)
        task = tasks.start(self._reply(connection, correlation, message), "plait-meta-answer")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, connection: Connection, correlation: int, message: m.PacketHead) -> None:
        error: PlaitError | None = None
        try:
            result = await self.serve(message)
        except PlaitError as refusal:
            error = refusal
        except Exception as defect:
            log.exception("a request of client %s failed", connection.client)
            error = InternalError(f"the meta server failed on this request ({type(defect).__name__}); see its log")
        if connection.polls.pop(correlation, None) is None:
            return
        if error is not None:
            connection.fail(correlation, error)
        else:
            connection.answer(correlation, result)

    async def stop(self) -> None:
        """Cancel all requests. Later ones are refused with ``Unavailable``, so that clients ask another meta server."""
        self._stopped = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def serve(self, message: m.PacketHead) -> m.PacketHead:
        """The reply to a request."""
        if self._stopped:
            raise Unavailable("this meta server is stopping; ask another one, or try again later")
        if isinstance(message, m.RouteRequest):
            names.check("subject", message.subject)
            view = await self._host.route(message.subject, create=message.create)
            return _route_reply(view, self._host.metas)
        if isinstance(message, m.MemberHeartbeatRequest):
            return self._heartbeat_reply(await self._host.heartbeat(message))
        assert isinstance(message, m.AdminRequest)
        if message.operation in self._others:
            operation, call = self._others[message.operation]
            return answer(await call(operation.arguments(message)))
        operation, run, decide = self._decisions[message.operation]
        request = operation.arguments(message)
        return answer(await run(lambda s: decide(s, request)))

    # --- heartbeats of clients ------------------------------------------------------------------

    def _at_once(self, connection: Connection, heartbeat: m.MemberHeartbeatRequest) -> m.MemberHeartbeatReply | None:
        """The reply to a heartbeat that is refused or that repeats the last one; None if ``serve`` must answer it."""
        text = self.refuse(connection, heartbeat)
        if text is not None:
            refused = [(subject, group, GroupBusy.code, text) for subject, group, _ in heartbeat.members]
            return m.MemberHeartbeatReply(heartbeat.seen, [], self._host.metas, {}, refused)
        view = None if self._stopped else self._host.heartbeat_at_once(heartbeat)
        if view is None or (view.seen == heartbeat.seen and heartbeat.wait > 0):
            return None
        return self._heartbeat_reply(view)

    def _heartbeat_reply(self, view: HeartbeatView) -> m.MemberHeartbeatReply:
        # The shares are already packed.
        refused = [(*key, error.code, error.message) for key, error in view.refused.items()]
        return m.MemberHeartbeatReply(view.seen, view.packed, self._host.metas, view.routes, refused)  # type: ignore[arg-type]

    def refuse(self, connection: Connection, heartbeat: m.MemberHeartbeatRequest) -> str | None:
        """Check a heartbeat of a process. Returns the text of the refusal if another process owns the client id."""
        client, instance = heartbeat.client, heartbeat.instance
        if not instance:
            return None
        now, limits = self._host.clock.monotonic(), self._host.limits
        owner = self._id_owners.get(client)
        refused = 0
        if owner is not None and owner.instance == instance:
            refused = owner.refused
        elif owner is not None and not owner.connection.closed and now - owner.last_heartbeat < limits.speaker_seconds:
            at = owner.connection.address
            if owner.refused != instance:
                self._id_owners[client] = owner._replace(refused=instance)
                log.warning(
                    "two processes use client id %r: the one at %s owns it, the one at %s is refused",
                    client,
                    at,
                    connection.address,
                )
            return (
                f"client id {client!r} is used by another live process, at {at}; give every process its own client_id"
            )
        self._id_owners.pop(client, None)
        if not heartbeat.leaving:
            self._id_owners[client] = _IdOwner(instance, now, connection, refused)
        while self._id_owners:
            client, owner = next(iter(self._id_owners.items()))
            if owner.last_heartbeat > now - limits.member_lost_seconds:
                break
            del self._id_owners[client]
        return None

    # --- routes ---------------------------------------------------------------------------------

    async def _route(self, subject: str) -> c.RouteDetails:
        view = await self._host.route(subject, create=False)
        route = view.route
        return c.RouteDetails(
            route.subject,
            route.version,
            view.settings.order,
            [str(place) for place in route.partitions],
            _route_reply(view, []).histories,
            list(route.target),
            view.brokers,
            view.passed,
            view.reported,
        )

    async def _recur(self, decision: Callable[[MetaService], Any]) -> Any:
        # The loop exists once the server has started.
        return await self._host.firing.decide(decision)

    async def _create_recurrence(self, request: r.CreateRecurrence) -> r.RecurrenceRow:
        Definition.of(request, self._host.clock.now())
        # A subject is created on first use, as by a send.
        await self._host.route(request.subject, create=True)
        row: r.RecurrenceRow = await self._recur(lambda s: s.recurrences.create(request))
        return row

    async def _expand(self, request: c.ExpandSubject) -> c.RouteDetails:
        wanted = request.partitions
        places = wanted if isinstance(wanted, int) else [_place(text) for text in wanted]
        await self._host.choose(lambda s: s.routing.retarget(request.subject, places))
        return await self._route(request.subject)


def _route_reply(view: RouteView, metas: list[str]) -> m.RouteReply:
    route = view.route
    return m.RouteReply(
        route.subject,
        route.version,
        view.settings.order,
        [(place.name, place.group) for place in route.partitions],
        [(each.first, each.end, [(span.partition, span.fence) for span in each.spans]) for each in route.histories],
        {group: (addresses, state) for group, (addresses, state) in view.brokers.items()},
        metas,
        view.passed,
    )


def _create(service: MetaService, request: g.CreateSubject) -> None:
    settings = SubjectSettings(request.retention_seconds, request.retention_bytes, request.order)  # type: ignore[arg-type]
    service.subjects.create(request.subject, settings, partitions=request.partitions, groups=request.groups)


def _pause(request: g.PauseGroup, service: MetaService) -> int | None:
    return service.subjects.pause(request.subject, request.group, paused=request.paused)


def _remembered(service: MetaService, request: g.AskRemembered) -> g.Remembered:
    return service.retiring.remembered(request.subject, names.of_group(request.group, request.client))


def _register(service: MetaService, request: c.RegisterBroker) -> c.RegisterReply:
    # Clients send messages to the address, so it must be on this machine, as all servers are.
    host, _ = parse_address(request.address)
    if host not in LOOPBACK:
        raise InvalidArgument(
            f"broker address {request.address!r} is not on this machine; servers have no authentication, "
            f"so use one of {', '.join(LOOPBACK)}"
        )
    return service.register_broker(
        request.group,
        request.broker,
        request.address,
        state=request.state,
        epoch=request.epoch,
        partitions=request.partitions,
        reason=request.reason,
    )


def _broker_groups(service: MetaService, _: object) -> dict[str, tuple[list[str], str]]:
    """Addresses and state of each broker group."""
    groups: dict[str, tuple[list[str], str]] = {}
    for view in service.brokers.views():
        groups.setdefault(view.group, ([], view.state))[0].append(view.address)
    return groups


def _place(text: str) -> PartitionId:
    name, _, group = text.rpartition("@")
    if not name:
        raise InvalidArgument(f"partition {text!r} is invalid; write name@group")
    return PartitionId(name, group)
