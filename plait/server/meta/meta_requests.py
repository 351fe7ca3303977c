"""Requests to a meta server: routes, heartbeats of clients and brokers, and the management of subjects.

Decisions are made in another thread, so each request is a task; its answer goes to the connection it came from, if that
is still there.
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

#: Batches that their drivers left undone and that one answer names: they are published at the same time.
UNDONE_MAX = 4


class CreateSubject(msgspec.Struct, forbid_unknown_fields=True):
    """A new subject: what it keeps, how it is ordered, and how it is spread."""

    subject: str
    retention_seconds: float | None = None
    retention_bytes: int | None = None
    order: str = "best_tried"
    #: How many partitions; None: one on each of two broker groups.
    partitions: int | None = None
    #: The broker groups they are on; None: any.
    groups: list[str] | None = None


class SetSubject(msgspec.Struct, forbid_unknown_fields=True):
    """Other settings of a subject: what is unset stays, None is the brokers' default."""

    subject: str
    retention_seconds: float | msgspec.UnsetType | None = msgspec.UNSET
    retention_bytes: int | msgspec.UnsetType | None = msgspec.UNSET


class OfSubject(msgspec.Struct, forbid_unknown_fields=True):
    """Names a subject."""

    subject: str


class ExpandSubject(msgspec.Struct, forbid_unknown_fields=True):
    """How many partitions are to take its messages, or which (as name@group)."""

    subject: str
    partitions: int | list[str]


class OfGroup(msgspec.Struct, forbid_unknown_fields=True):
    """Names a group of a subject."""

    subject: str
    group: str


class RegisterBroker(msgspec.Struct, forbid_unknown_fields=True):
    """A broker has started; what it has comes page by page."""

    group: str
    broker: str
    address: str
    state: State
    epoch: BrokerEpoch
    partitions: list[RegisteredPartition]
    #: Why it takes no messages; empty where it does.
    reason: str = ""


class BeatBroker(msgspec.Struct, forbid_unknown_fields=True):
    """A broker lives."""

    group: str
    broker: str
    state: State
    #: Why it takes no messages; empty where it does.
    reason: str = ""


class ReportProgress(msgspec.Struct, forbid_unknown_fields=True):
    """What is finished in some partitions of a broker."""

    group: str
    broker: str
    partitions: list[PartitionProgress]


class ForgetBroker(msgspec.Struct, forbid_unknown_fields=True):
    """A broker group that will not come back; ``lost``: also if messages are lost with it."""

    group: str
    lost: bool = False


class WishState(msgspec.Struct, forbid_unknown_fields=True):
    """What the operator wants of a broker group."""

    group: str
    state: State


class DecideBatch(msgspec.Struct, forbid_unknown_fields=True):
    """A batch of a query that is to count, and the stages that hold its rows."""

    query: str
    batch: int
    stages: Stages


class VetoBatch(msgspec.Struct, forbid_unknown_fields=True):
    """An attempt to write a batch that was called off, by the producer of one of its stages."""

    query: str
    batch: int
    producer: int


class ExchangeStages(msgspec.Struct, forbid_unknown_fields=True):
    """Where a batch's rows are now."""

    query: str
    batch: int
    version: int
    stages: Stages


class BatchDone(msgspec.Struct, forbid_unknown_fields=True):
    """A batch that is published."""

    query: str
    batch: int
    version: int


class UndoneBatches(msgspec.Struct, forbid_unknown_fields=True):
    """Batches that were left undone, of the queries whose names come behind one."""

    after: str = ""


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """No arguments."""


def route_found(subject: str, view: RouteView, metas: list[str]) -> m.RouteReply:
    """A route as clients get it."""
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
    """See the module."""

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
            "broker.beat": (BeatBroker, self._beat_broker),
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
        """Whether the request is for a meta server."""
        if isinstance(message, m.AdminRequest):
            return message.operation in self._operations
        return isinstance(message, m.RouteRequest | m.MemberHeartbeatRequest)

    def handle(self, connection: Connection, correlation: int, message: m.PacketHead) -> None:
        """Serve a request; it is answered later, but for heartbeats that say nothing new and wait for nothing."""
        if (
            isinstance(message, m.MemberHeartbeatRequest)
            and (refused := self._refused(connection, message)) is not None
        ):
            connection.answer(correlation, refused)
            return
        if isinstance(message, m.MemberHeartbeatRequest) and not message.leaving and not self._stopped:
            beaten = self._host.beat_at_once(message.client, message.members, message.seen, message.affinity)
            if beaten is not None and (beaten.seen != message.seen or message.wait <= 0):
                connection.answer(correlation, self._beaten(beaten))
                return
        poll = connection.begin_poll(correlation, None)

        async def answer() -> None:
            try:
                result = await self.serve(message)
            except PlaitError as error:
                if connection.end_poll(poll):
                    connection.fail(correlation, error)
            except Exception as error:
                log.exception("a request of %s failed", connection.client)
                if connection.end_poll(poll):
                    connection.fail(correlation, InternalError(f"the meta server failed ({type(error).__name__})"))
            else:
                if connection.end_poll(poll):
                    connection.answer(correlation, result)

        task = tasks.start(answer(), "plait-meta-answer")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Nobody is answered any more: who asks is told to ask another."""
        self._stopped = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def serve(self, message: m.PacketHead) -> m.PacketHead:
        """The answer to a request."""
        if self._stopped:
            raise Unavailable("this meta server is stopping; ask another, or again")
        if isinstance(message, m.RouteRequest):
            names.check("subject", message.subject)
            view = await self._host.route(message.subject, create=message.create)
            return route_found(message.subject, view, self._host.metas)
        if isinstance(message, m.MemberHeartbeatRequest):
            return await self._beat(message)
        assert isinstance(message, m.AdminRequest)
        kind, call = self._operations[message.operation]
        try:
            request = msgspec.convert(message.arguments, kind)
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"{message.operation}: {error}") from None
        return m.AdminReply(msgspec.Raw(msgspec.msgpack.encode(await call(request))))

    def _refused(self, connection: Connection, beat: m.MemberHeartbeatRequest) -> m.MemberHeartbeatReply | None:
        """The answer to a process that beats for a client id for which another one does; None: it is the only one."""
        text = self._host.speakers.refuse(beat.client, beat.instance, connection, leaving=beat.leaving)
        if text is None:
            return None
        refused = [(subject, group, GroupBusy.code, text) for subject, group, _ in beat.members]
        return m.MemberHeartbeatReply(beat.seen, [], self._host.metas, {}, refused)

    async def _beat(self, beat: m.MemberHeartbeatRequest) -> m.MemberHeartbeatReply:
        beaten = await self._host.beat(
            beat.client, beat.members, beat.seen, beat.wait, leaving=beat.leaving, affinity=beat.affinity
        )
        return self._beaten(beaten)

    def _beaten(self, beaten: HeartbeatView) -> m.MemberHeartbeatReply:
        # Shares are packed already.
        refused = [(*key, error.code, error.message) for key, error in beaten.refused.items()]
        return m.MemberHeartbeatReply(beaten.seen, beaten.packed, self._host.metas, beaten.routes, refused)  # type: ignore[arg-type]

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

    async def _beat_broker(self, request: BeatBroker) -> int:
        """How far the counter of routes and epochs has come; 0: the broker is not known."""
        return await self._host.call(
            lambda s: (
                max(s.newest, 1) if s.beat_broker(request.group, request.broker, request.state, request.reason) else 0
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
        """Addresses and state by the name of the broker group."""
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
        raise InvalidArgument(f"partition {text!r} is not understood; write name@group")
    return PartitionId(name, group)


def _check_address(address: str) -> None:
    """Clients are sent there, with all that they send: it is understood, and on this machine, as all servers are."""
    host, _ = parse_address(address)
    if host not in LOOPBACK:
        raise InvalidArgument(
            f"broker address {address!r} is not of this machine; without authentication servers are on "
            f"{', '.join(LOOPBACK)} only"
        )
