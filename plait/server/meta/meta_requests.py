"""Requests to a meta server: routes, heartbeats of clients and brokers, and the management of subjects.

Decisions run in another thread, so each request is a task. Its reply goes to the connection that it came from, if that
is still open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from plait import tasks
from plait.errors import GroupBusy, InternalError, InvalidArgument, PlaitError, Unavailable
from plait.meta.views import HeartbeatView, RouteView
from plait.model import names
from plait.model.route import PartitionId
from plait.model.settings import SubjectSettings
from plait.server.listener import LOOPBACK
from plait.server.meta.meta_host import MetaHost
from plait.wire import messages as m
from plait.wire.admin import cluster as c
from plait.wire.admin import subjects as g
from plait.wire.admin.operation import Nothing, Operation, answer
from plait.wire.link import parse_address

if TYPE_CHECKING:
    from plait.server.connection import Connection

log = logging.getLogger("plait.meta")

#: Unfinished batches in one reply. The client publishes them concurrently.
UNDONE_MAX = 4


def route_found(subject: str, view: RouteView, metas: list[str]) -> m.RouteReply:
    """A route as it is sent to clients."""
    route = view.route
    return m.RouteReply(
        subject,
        route.version,
        view.settings.order,
        [(place.name, place.group) for place in route.partitions],
        [(each.first, each.end, [(span.partition, span.fence) for span in each.spans]) for each in route.histories],
        {group: (addresses, state) for group, (addresses, state) in view.brokers.items()},
        metas,
        view.passed,
    )


class MetaHandlers:
    """Serves requests to a meta server."""

    def __init__(self, host: MetaHost) -> None:
        self._host = host
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False
        handlers: list[tuple[Operation[Any], Callable[[Any], Awaitable[Any]]]] = [
            (g.CREATE_SUBJECT, self._create),
            (g.SET_SUBJECT, self._set),
            (g.DELETE_SUBJECT, self._delete),
            (g.FORGET_GROUP, self._forget_group),
            (g.GROUP_REMEMBERED, self._remembered),
            (g.SUBJECT_NAMES, self._names),
            (c.DESCRIBE_ROUTE, self._route),
            (c.EXPAND_SUBJECT, self._expand),
            (c.REGISTER_BROKER, self._register),
            (c.BROKER_HEARTBEAT, self._broker_heartbeat),
            (c.REPORT_PROGRESS, self._progress),
            (c.FORGET_BROKER, self._forget_broker),
            (c.SET_BROKER_STATE, self._set_state),
            (c.LIST_BROKERS, self._broker_groups),
            (c.DESCRIBE_BROKERS, self._brokers),
            (c.DESCRIBE_ALLOCATION, self._allocation),
            (c.DECIDE_BATCH, self._decide_batch),
            (c.VETO_BATCH, self._veto_batch),
            (c.EXCHANGE_STAGES, self._exchange_stages),
            (c.BATCH_DONE, self._batch_done),
            (c.UNDONE_BATCHES, self._undone),
        ]
        self._operations = {operation.name: (operation, call) for operation, call in handlers}

    def takes(self, message: m.PacketHead) -> bool:
        """True if the request is for a meta server."""
        if isinstance(message, m.AdminRequest):
            return message.operation in self._operations
        return isinstance(message, m.RouteRequest | m.MemberHeartbeatRequest)

    def handle(self, connection: Connection, correlation: int, message: m.PacketHead) -> None:
        """Serve a request. The reply comes later, except for repeated heartbeats that do not wait."""
        if (
            isinstance(message, m.MemberHeartbeatRequest)
            and (refused := self._refused(connection, message)) is not None
        ):
            connection.answer(correlation, refused)
            return
        if isinstance(message, m.MemberHeartbeatRequest) and not message.leaving and not self._stopped:
            view = self._host.heartbeat_at_once(message.client, message.members, message.seen, message.affinity)
            if view is not None and (view.seen != message.seen or message.wait <= 0):
                connection.answer(correlation, self._heartbeat_reply(view))
                return
        polls = connection.begin_poll(correlation)

        async def reply() -> None:
            try:
                result = await self.serve(message)
            except PlaitError as error:
                if polls.pop(correlation, None) is not None:
                    connection.fail(correlation, error)
            except Exception as error:
                log.exception("a request of client %s failed", connection.client)
                if polls.pop(correlation, None) is not None:
                    connection.fail(
                        correlation,
                        InternalError(f"the meta server failed on this request ({type(error).__name__}); see its log"),
                    )
            else:
                if polls.pop(correlation, None) is not None:
                    connection.answer(correlation, result)

        task = tasks.start(reply(), "plait-meta-answer")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
            return route_found(message.subject, view, self._host.metas)
        if isinstance(message, m.MemberHeartbeatRequest):
            return await self._heartbeat(message)
        assert isinstance(message, m.AdminRequest)
        operation, call = self._operations[message.operation]
        return answer(await call(operation.arguments(message)))

    def _refused(self, connection: Connection, heartbeat: m.MemberHeartbeatRequest) -> m.MemberHeartbeatReply | None:
        """The reply that refuses a heartbeat, if another process owns its client id; otherwise None."""
        text = self._host.client_ids.refuse(heartbeat.client, heartbeat.instance, connection, leaving=heartbeat.leaving)
        if text is None:
            return None
        refused = [(subject, group, GroupBusy.code, text) for subject, group, _ in heartbeat.members]
        return m.MemberHeartbeatReply(heartbeat.seen, [], self._host.metas, {}, refused)

    async def _heartbeat(self, heartbeat: m.MemberHeartbeatRequest) -> m.MemberHeartbeatReply:
        view = await self._host.heartbeat(
            heartbeat.client,
            heartbeat.members,
            heartbeat.seen,
            heartbeat.wait,
            leaving=heartbeat.leaving,
            affinity=heartbeat.affinity,
        )
        return self._heartbeat_reply(view)

    def _heartbeat_reply(self, view: HeartbeatView) -> m.MemberHeartbeatReply:
        # The shares are already packed.
        refused = [(*key, error.code, error.message) for key, error in view.refused.items()]
        return m.MemberHeartbeatReply(view.seen, view.packed, self._host.metas, view.routes, refused)  # type: ignore[arg-type]

    # --- management -----------------------------------------------------------------------------

    async def _create(self, request: g.CreateSubject) -> None:
        names.check("subject", request.subject)
        settings = SubjectSettings(request.retention_seconds, request.retention_bytes, request.order)  # type: ignore[arg-type]
        await self._host.choose(
            lambda s: s.create_subject(request.subject, settings, partitions=request.partitions, groups=request.groups)
        )

    async def _set(self, request: g.SetSubject) -> None:
        await self._host.set_subject(request.subject, request.settings)

    async def _forget_group(self, request: g.OfGroup) -> bool:
        return await self._host.change(lambda s: s.forget_group(request.subject, request.group))

    async def _remembered(self, request: g.AskRemembered) -> g.Remembered:
        name = names.of_group(request.group, request.client)
        return await self._host.call(lambda s: s.remembered(request.subject, name))

    async def _delete(self, request: g.OfSubject) -> None:
        await self._host.delete_subject(request.subject)

    async def _names(self, _: Nothing) -> list[str]:
        return await self._host.call(lambda s: [view.name for view in s.subjects()])

    async def _route(self, request: g.OfSubject) -> c.RouteDetails:
        view = await self._host.route(request.subject, create=False)
        route = view.route
        return c.RouteDetails(
            route.subject,
            route.version,
            view.settings.order,
            [str(place) for place in route.partitions],
            route_found(route.subject, view, []).histories,
            list(route.target),
            view.brokers,
            view.passed,
            view.reported,
        )

    async def _expand(self, request: c.ExpandSubject) -> c.RouteDetails:
        wanted = request.partitions
        places = wanted if isinstance(wanted, int) else [_place(text) for text in wanted]
        await self._host.choose(lambda s: s.expand(request.subject, places))
        return await self._route(g.OfSubject(request.subject))

    # --- brokers --------------------------------------------------------------------------------

    async def _register(self, request: c.RegisterBroker) -> c.RegisterReply:
        _check_address(request.address)
        registered = await self._host.change(
            lambda s: s.register_broker(
                request.group,
                request.broker,
                request.address,
                state=request.state,
                epoch=request.epoch,
                partitions=request.partitions,
                reason=request.reason,
            )
        )
        floors = [(*key, runs) for key, runs in registered.floors.items()]
        return c.RegisterReply(registered.cluster, floors, registered.unrouted, registered.newest)

    async def _broker_heartbeat(self, request: c.BrokerHeartbeat) -> int:
        """The newest change number; 0 if the broker must register."""
        return await self._host.call(
            lambda s: (
                max(s.newest, 1)
                if s.broker_heartbeat(request.group, request.broker, request.state, request.reason)
                else 0
            )
        )

    async def _progress(self, request: c.ReportProgress) -> bool:
        return await self._host.change(lambda s: s.report_progress(request.group, request.broker, request.partitions))

    async def _forget_broker(self, request: c.ForgetBroker) -> list[c.LostPartition]:
        return await self._host.choose(lambda s: s.forget_broker(request.group, lost=request.lost))

    async def _set_state(self, request: c.SetBrokerState) -> None:
        await self._host.change(lambda s: s.set_broker_state(request.group, request.state))

    async def _brokers(self, _: Nothing) -> list[c.BrokerInfo]:
        return await self._host.call(lambda s: s.brokers())

    async def _broker_groups(self, _: Nothing) -> dict[str, tuple[list[str], str]]:
        """Addresses and state of each broker group."""
        groups: dict[str, tuple[list[str], str]] = {}
        for view in await self._host.call(lambda s: s.brokers()):
            groups.setdefault(view.group, ([], view.state))[0].append(view.address)
        return groups

    # --- batches of sinks -----------------------------------------------------------------------

    async def _decide_batch(self, request: c.DecideBatch) -> c.BatchDecision:
        names.check("query", request.query)
        return await self._host.call(lambda s: s.commits.decide(request.query, request.batch, request.stages))

    async def _veto_batch(self, request: c.VetoBatch) -> c.BatchDecision | None:
        names.check("query", request.query)
        return await self._host.call(lambda s: s.commits.veto(request.query, request.batch, request.producer))

    async def _exchange_stages(self, request: c.ExchangeStages) -> c.BatchDecision | None:
        return await self._host.call(
            lambda s: s.commits.exchange(request.query, request.batch, request.version, request.stages)
        )

    async def _batch_done(self, request: c.BatchDone) -> bool:
        return await self._host.call(lambda s: s.commits.done(request.query, request.batch, request.version))

    async def _undone(self, request: c.UndoneBatches) -> list[c.BatchDecision]:
        return await self._host.call(lambda s: s.commits.undone(UNDONE_MAX, request.after))

    async def _allocation(self, request: g.OfGroup) -> c.AllocationReply:
        return await self._host.call(lambda s: s.allocation(request.subject, request.group))


def _place(text: str) -> PartitionId:
    name, _, group = text.rpartition("@")
    if not name:
        raise InvalidArgument(f"partition {text!r} is invalid; write name@group")
    return PartitionId(name, group)


def _check_address(address: str) -> None:
    """Check a broker's address. Clients send messages there, so it must be on this machine, as all servers are."""
    host, _ = parse_address(address)
    if host not in LOOPBACK:
        raise InvalidArgument(
            f"broker address {address!r} is not on this machine; servers have no authentication, "
            f"so use one of {', '.join(LOOPBACK)}"
        )
