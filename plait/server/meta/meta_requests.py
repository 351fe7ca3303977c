"""Requests to a meta server: routes, heartbeats of clients and brokers, and the management of subjects.

Decisions run in another thread, so each request is a task. Its reply goes to the connection that it came from, if that
is still open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from plait import tasks
from plait.errors import GroupBusy, InternalError, InvalidArgument, PlaitError, Unavailable
from plait.limits import BrokerEpoch
from plait.meta.batch_commits import BatchDecision, Stages
from plait.meta.views import HeartbeatView, PartitionProgress, RegisteredPartition, Remembered, RouteView, State
from plait.model import names
from plait.model.route import PartitionId
from plait.model.settings import SubjectSettings
from plait.server.listener import LOOPBACK
from plait.server.meta.meta_host import MetaHost
from plait.server.operations.subjects_and_groups import AskRemembered, set_fields
from plait.wire import messages as m
from plait.wire.link import parse_address

if TYPE_CHECKING:
    from plait.server.connection import Connection

log = logging.getLogger("plait.meta")

#: Unfinished batches in one reply. The client publishes them concurrently.
UNDONE_MAX = 4


class CreateSubject(msgspec.Struct, forbid_unknown_fields=True):
    """Create a subject with retention, order strategy and partitions."""

    subject: str
    retention_seconds: float | None = None
    retention_bytes: int | None = None
    order: str = "best_tried"
    #: Number of partitions; None: one on each of two broker groups.
    partitions: int | None = None
    #: Their broker groups; None: any.
    groups: list[str] | None = None


class SetSubject(msgspec.Struct, forbid_unknown_fields=True):
    """Change settings of a subject. Unset fields stay; None is the brokers' default."""

    subject: str
    retention_seconds: float | msgspec.UnsetType | None = msgspec.UNSET
    retention_bytes: int | msgspec.UnsetType | None = msgspec.UNSET


class OfSubject(msgspec.Struct, forbid_unknown_fields=True):
    """Names a subject."""

    subject: str


class ExpandSubject(msgspec.Struct, forbid_unknown_fields=True):
    """Set how many partitions take the subject's messages, or which (as name@group)."""

    subject: str
    partitions: int | list[str]


class OfGroup(msgspec.Struct, forbid_unknown_fields=True):
    """Names a group of a subject."""

    subject: str
    group: str


class RegisterBroker(msgspec.Struct, forbid_unknown_fields=True):
    """Register a broker that has started; its partitions come page by page."""

    group: str
    broker: str
    address: str
    state: State
    epoch: BrokerEpoch
    partitions: list[RegisteredPartition]
    #: Why the broker takes no messages; empty: it takes them.
    reason: str = ""


class BrokerHeartbeat(msgspec.Struct, forbid_unknown_fields=True):
    """A heartbeat of a broker."""

    group: str
    broker: str
    state: State
    #: Why the broker takes no messages; empty: it takes them.
    reason: str = ""


class ReportProgress(msgspec.Struct, forbid_unknown_fields=True):
    """Reports of finished LPs and removed rows, for some partitions of a broker."""

    group: str
    broker: str
    partitions: list[PartitionProgress]


class ForgetBroker(msgspec.Struct, forbid_unknown_fields=True):
    """Remove a broker group that will not return; with ``lost``, even if messages are lost."""

    group: str
    lost: bool = False


class WishState(msgspec.Struct, forbid_unknown_fields=True):
    """Set the state that the operator wants for a broker group."""

    group: str
    state: State


class DecideBatch(msgspec.Struct, forbid_unknown_fields=True):
    """Commit a batch of a query with the stages that hold its rows."""

    query: str
    batch: int
    stages: Stages


class VetoBatch(msgspec.Struct, forbid_unknown_fields=True):
    """Cancel an attempt to write a batch; ``producer`` is that of one of its stages."""

    query: str
    batch: int
    producer: int


class ExchangeStages(msgspec.Struct, forbid_unknown_fields=True):
    """Replace the stages of a committed batch."""

    query: str
    batch: int
    version: int
    stages: Stages


class BatchDone(msgspec.Struct, forbid_unknown_fields=True):
    """Mark a batch as published."""

    query: str
    batch: int
    version: int


class UndoneBatches(msgspec.Struct, forbid_unknown_fields=True):
    """List unfinished batches of queries whose names come after ``after``."""

    after: str = ""


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """No arguments."""


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
        self._operations: dict[str, tuple[type[Any], Callable[[Any], Awaitable[Any]]]] = {
            "subject.create": (CreateSubject, self._create),
            "subject.set": (SetSubject, self._set),
            "subject.delete": (OfSubject, self._delete),
            "group.forget": (OfGroup, self._forget_group),
            "group.remembered": (AskRemembered, self._remembered),
            "subject.names": (Nothing, self._names),
            "subject.route": (OfSubject, self._route),
            "subject.expand": (ExpandSubject, self._expand),
            "broker.register": (RegisterBroker, self._register),
            "broker.heartbeat": (BrokerHeartbeat, self._broker_heartbeat),
            "broker.progress": (ReportProgress, self._progress),
            "broker.forget": (ForgetBroker, self._forget_broker),
            "broker.state": (WishState, self._wish),
            "broker.list": (Nothing, self._broker_groups),
            "broker.describe": (Nothing, self._brokers),
            "group.allocation": (OfGroup, self._allocation),
            "commit.decide": (DecideBatch, self._decide_batch),
            "commit.veto": (VetoBatch, self._veto_batch),
            "commit.exchange": (ExchangeStages, self._exchange_stages),
            "commit.done": (BatchDone, self._batch_done),
            "commit.undone": (UndoneBatches, self._undone),
        }

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

        async def answer() -> None:
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

        task = tasks.start(answer(), "plait-meta-answer")
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
        kind, call = self._operations[message.operation]
        try:
            request = msgspec.convert(message.arguments, kind)
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"{message.operation}: {error}") from None
        return m.AdminReply(msgspec.Raw(msgspec.msgpack.encode(await call(request))))

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

    async def _create(self, request: CreateSubject) -> dict[str, Any]:
        names.check("subject", request.subject)
        settings = SubjectSettings(request.retention_seconds, request.retention_bytes, request.order)  # type: ignore[arg-type]
        await self._host.choose(
            lambda s: s.create_subject(request.subject, settings, partitions=request.partitions, groups=request.groups)
        )
        return await self._route(OfSubject(request.subject))

    async def _set(self, request: SetSubject) -> dict[str, Any]:
        await self._host.set_subject(request.subject, set_fields(request))
        return await self._route(OfSubject(request.subject))

    async def _forget_group(self, request: OfGroup) -> bool:
        return await self._host.change(lambda s: s.forget_group(request.subject, request.group))

    async def _remembered(self, request: AskRemembered) -> Remembered:
        name = names.of_group(request.group, request.client)
        return await self._host.call(lambda s: s.remembered(request.subject, name))

    async def _delete(self, request: OfSubject) -> None:
        await self._host.delete_subject(request.subject)

    async def _names(self, _: Nothing) -> list[str]:
        return await self._host.call(lambda s: [view.name for view in s.subjects()])

    async def _route(self, request: OfSubject) -> dict[str, Any]:
        view = await self._host.route(request.subject, create=False)
        route = view.route
        return {
            "subject": route.subject,
            "version": route.version,
            "order": view.settings.order,
            "partitions": [str(place) for place in route.partitions],
            "histories": route_found(route.subject, view, []).histories,
            "target": route.target,
            "brokers": view.brokers,
            "passed": view.passed,
            "reported": view.reported,
        }

    async def _expand(self, request: ExpandSubject) -> dict[str, Any]:
        wanted = request.partitions
        places = wanted if isinstance(wanted, int) else [_place(text) for text in wanted]
        await self._host.choose(lambda s: s.expand(request.subject, places))
        return await self._route(OfSubject(request.subject))

    # --- brokers --------------------------------------------------------------------------------

    async def _register(self, request: RegisterBroker) -> dict[str, Any]:
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
        return {
            "cluster": registered.cluster,
            "floors": [(*key, runs) for key, runs in registered.floors.items()],
            "unrouted": registered.unrouted,
            "newest": registered.newest,
        }

    async def _broker_heartbeat(self, request: BrokerHeartbeat) -> int:
        """The newest change number; 0 if the broker must register."""
        return await self._host.call(
            lambda s: (
                max(s.newest, 1)
                if s.broker_heartbeat(request.group, request.broker, request.state, request.reason)
                else 0
            )
        )

    async def _progress(self, request: ReportProgress) -> bool:
        return await self._host.change(lambda s: s.report_progress(request.group, request.broker, request.partitions))

    async def _forget_broker(self, request: ForgetBroker) -> Any:
        return await self._host.choose(lambda s: s.forget_broker(request.group, lost=request.lost))

    async def _wish(self, request: WishState) -> None:
        await self._host.change(lambda s: s.set_broker_state(request.group, request.state))

    async def _brokers(self, _: Nothing) -> Any:
        return await self._host.call(lambda s: s.brokers())

    async def _broker_groups(self, _: Nothing) -> dict[str, tuple[list[str], str]]:
        """Addresses and state of each broker group."""
        groups: dict[str, tuple[list[str], str]] = {}
        for view in await self._host.call(lambda s: s.brokers()):
            groups.setdefault(view.group, ([], view.state))[0].append(view.address)
        return groups

    # --- batches of sinks -----------------------------------------------------------------------

    async def _decide_batch(self, request: DecideBatch) -> BatchDecision:
        names.check("query", request.query)
        return await self._host.call(lambda s: s.commits.decide(request.query, request.batch, request.stages))

    async def _veto_batch(self, request: VetoBatch) -> BatchDecision | None:
        names.check("query", request.query)
        return await self._host.call(lambda s: s.commits.veto(request.query, request.batch, request.producer))

    async def _exchange_stages(self, request: ExchangeStages) -> BatchDecision | None:
        return await self._host.call(
            lambda s: s.commits.exchange(request.query, request.batch, request.version, request.stages)
        )

    async def _batch_done(self, request: BatchDone) -> bool:
        return await self._host.call(lambda s: s.commits.done(request.query, request.batch, request.version))

    async def _undone(self, request: UndoneBatches) -> list[BatchDecision]:
        return await self._host.call(lambda s: s.commits.undone(UNDONE_MAX, request.after))

    async def _allocation(self, request: OfGroup) -> Any:
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
