"""Requests: from a packet to the broker and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from plait import names
from plait.broker.group import Delivery, Failure
from plait.broker.membership import resolve_start
from plait.broker.partition import Batch
from plait.errors import InvalidArgument, LimitExceeded, PlaitError, ProtocolError, StaleRoute, VersionMismatch
from plait.frame.header import SEQUENCE_MAX
from plait.frame.view import FrameView
from plait.limits import FAILED_RANGES_MAX, LOGICAL_PARTITIONS, REQUEST_RANGES_MAX
from plait.reason import Reason
from plait.retry import ATTEMPTS_MAX, WAIT_SECONDS_MAX
from plait.server import admin, admin_partition, admin_stage
from plait.version import VERSION
from plait.wire import messages as m
from plait.wire.packets import Packet

if TYPE_CHECKING:
    from plait.server.connection import Connection
    from plait.server.host import Server

Handler = Callable[["Connection", int, Any, memoryview], None]


class Handlers:
    """One method a request."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._broker = server.broker
        #: Partitions made for a route whose answer waits for the commit.
        self._new: set[int] = set()
        self._table: dict[int, Handler] = {
            m.Hello.KIND: self._hello,
            m.Heartbeat.KIND: self._heartbeat,
            m.Route.KIND: self._route,
            m.Send.KIND: self._send,
            m.Attach.KIND: self._attach,
            m.Pull.KIND: self._pull,
            m.Ack.KIND: self._ack,
            m.Nack.KIND: self._nack,
            m.Detach.KIND: self._detach,
            m.Lease.KIND: self._lease,
            m.Renew.KIND: self._renew,
            m.Read.KIND: self._read,
            m.Admin.KIND: self._admin,
            m.FindRoute.KIND: self._find_route,
            m.Beat.KIND: self._beat,
        }

    def handle(self, connection: Connection, packet: Packet) -> None:
        """Serve a request. A broken protocol closes the connection, anything else is answered."""
        handler = self._table.get(packet.kind)
        if handler is None:
            raise ProtocolError(f"packet kind {packet.kind} is not a request; is the client newer?")
        if not connection.client and packet.kind != m.Hello.KIND:
            raise ProtocolError("the first packet must be a hello")
        message = m.decode(packet.kind, packet.head)
        try:
            handler(connection, packet.correlation, message, packet.payload)
        except ProtocolError:
            raise
        except PlaitError as error:
            if self._broker.failed is not None:
                self._server.fail(self._broker.failed)
            connection.fail(packet.correlation, error)

    def _hello(self, connection: Connection, correlation: int, hello: m.Hello, _: memoryview) -> None:
        if not hello.version_min <= m.PROTOCOL_VERSION <= hello.version_max:
            raise VersionMismatch(
                f"this server speaks protocol {m.PROTOCOL_VERSION}, "
                f"the client {hello.version_min} to {hello.version_max}"
            )
        names.check("client", hello.client)
        connection.client = hello.client
        connection.answer(
            correlation,
            m.Welcome(
                m.PROTOCOL_VERSION,
                VERSION,
                self._broker.config.group,
                self._broker.epoch,
                self._broker.limits.consumer_lost_seconds,
                self._broker.limits.producer_window_frames,
            ),
        )

    def _heartbeat(self, connection: Connection, correlation: int, _: m.Heartbeat, __: memoryview) -> None:
        connection.hear_consumers()
        connection.answer(correlation, m.Done())

    def _route(self, connection: Connection, correlation: int, route: m.Route, _: memoryview) -> None:
        names.check_partition(route.name)
        before = self._broker.next_partition
        partition = self._broker.partition_of(route.name)
        if route.delayed:
            partition = self._broker.schedules.partition_of(route.name)
        answer = m.Routed(partition.id, partition.row.name)
        if before == self._broker.next_partition and partition.id not in self._new:
            connection.answer(correlation, answer)
            return

        def reply() -> None:
            self._new.discard(partition.id)
            connection.answer(correlation, answer)

        # A number that a crash takes back would be given to another subject.
        self._new.add(partition.id)
        self._broker.answer_after_commit(reply)

    def _find_route(self, connection: Connection, correlation: int, find: m.FindRoute, _: memoryview) -> None:
        if self._server.cluster.take(connection, correlation, find):
            return
        # A broker without a meta server is a cluster of its own.
        names.check("subject", find.subject)
        broker = self._broker
        row = broker.partition_of(find.subject, create=find.create).row
        group = broker.config.group
        route = m.RouteFound(
            find.subject,
            max(row.route, 1),
            row.settings.order,
            [(row.name, group)],
            [(0, LOGICAL_PARTITIONS, [(0, None)])],
            {group: ([self._server.address], "R" if broker.read_only else "RW")},
        )
        broker.answer_after_commit(lambda: connection.answer(correlation, route))

    def _beat(self, connection: Connection, correlation: int, beat: m.Beat, _: memoryview) -> None:
        if not self._server.cluster.take(connection, correlation, beat):
            raise InvalidArgument("there is no meta server here, so there are no ordered groups")

    def _send(self, connection: Connection, correlation: int, send: m.Send, payload: memoryview) -> None:
        partition = self._broker.partitions.get(send.partition)
        if partition is None:
            if send.oneway:
                return
            raise StaleRoute(f"partition {send.partition} is not served here; refresh the route")
        size = len(payload)
        try:
            frame = FrameView(payload)
            if frame.size != size:
                raise ProtocolError(f"a send of {size} bytes holds a frame of {frame.size}")
            if send.oneway:
                self._broker.submit(partition, frame, None)
                return

            def reply(sequence: int | None, error: PlaitError | None) -> None:
                connection.settled(size)
                if error is not None:
                    connection.fail(correlation, error)
                else:
                    connection.answer(correlation, m.Sent(sequence))

            self._broker.submit(partition, frame, reply)
            connection.took(size)
        except PlaitError:
            if send.oneway:
                return
            raise

    def _attach(self, connection: Connection, correlation: int, attach: m.Attach, _: memoryview) -> None:
        names.check_partition(attach.name)
        names.check("client", attach.client)
        if attach.group is not None:
            names.check_group(attach.group)
        if attach.delivery not in ("at_least_once", "at_most_once"):
            raise InvalidArgument(f"delivery {attach.delivery!r} is not known; use 'at_least_once' or 'at_most_once'")
        if not 0 <= attach.began < SEQUENCE_MAX:
            raise InvalidArgument(f"began {attach.began} is no version of a route")
        consumer = self._server.membership.attach(
            attach.name,
            attach.group,
            attach.client,
            start=attach.start,
            delivery=attach.delivery,  # type: ignore[arg-type]
            holds=_checked(_bounded(attach.holds)),
            holds_of=attach.partition,
            retry=attach.retry,
            ordered=attach.ordered,
            affinity=attach.affinity,
            token=attach.token,
            began=attach.began,
        )
        connection.attached(consumer)
        partition = consumer.group.partition
        retry = consumer.group.retry
        # Whose age may end it can fail for the last time on any attempt.
        reasons_from = 1 if retry.expires is not None else retry.attempts or ATTEMPTS_MAX
        connection.answer(
            correlation,
            m.Attached(
                consumer.session,
                partition.id,
                partition.row.name,
                consumer.group.name,
                reasons_from,
                self._broker.leases.seconds if attach.ordered else 0.0,
                partition.row.settings.order == "strict" and not attach.affinity,
                retry.attempts or 0,
            ),
        )

    def _pull(self, connection: Connection, correlation: int, pull: m.Pull, _: memoryview) -> None:
        consumer = connection.consumer(pull.session)
        wait = _checked_wait(pull.wait)
        poll = connection.begin_poll(correlation, pull.session)

        def reply(delivery: Delivery | None) -> None:
            if not connection.end_poll(poll):
                return
            if delivery is None:
                connection.answer(correlation, m.Pulled(news=consumer.news))
            else:
                pulled = m.Pulled(delivery.ranges, consumer.group.has_more, consumer.news, delivery.tags)
                connection.answer(correlation, pulled, delivery.parts, delivery.size)

        try:
            self._broker.pull(consumer, pull.count, pull.size, wait, reply)
        except PlaitError:
            connection.end_poll(poll)
            raise
        self._server.arm_timer()

    def _ack(self, connection: Connection, correlation: int, ack: m.Ack, _: memoryview) -> None:
        consumer = connection.consumer(ack.session)
        ranges, tags = _with_tags(_bounded(ack.ranges), ack.tags)
        self._broker.ack(consumer, ranges, lambda: connection.answer(correlation, m.Done()), tags)

    def _nack(self, connection: Connection, correlation: int, nack: m.Nack, _: memoryview) -> None:
        consumer = connection.consumer(nack.session)
        _bounded([*nack.ranges, *nack.lp_ranges])
        if nack.counted:
            _bounded(nack.ranges, FAILED_RANGES_MAX, "FAILED_RANGES_MAX")
        delay = nack.delay
        if delay is not None and not 0 <= delay <= WAIT_SECONDS_MAX:
            raise InvalidArgument(f"a delay of {delay} seconds is not possible; use 0 to {WAIT_SECONDS_MAX:.0f}")
        if not nack.counted:
            # Who gives back what it has not begun with does not want it again at once.
            self._server.membership.end_pulls(consumer)
        failure = Failure(delay, nack.reason or Reason(), nack.reject, nack.counted)
        ranges, tags = _with_tags(nack.ranges, nack.tags)
        if nack.lp_ranges:
            self._broker.leases.give_back(consumer, nack.lps, *_with_tags(nack.lp_ranges, nack.lp_tags))
        group, dead = consumer.group, consumer.group.died_count

        def reply() -> None:
            connection.answer(correlation, m.Nacked(died))

        self._broker.nack(consumer, ranges, reply, failure, tags)
        died = group.died_count - dead
        self._server.arm_timer()

    def _lease(self, connection: Connection, correlation: int, lease: m.Lease, _: memoryview) -> None:
        consumer = connection.consumer(lease.session)
        leased = self._broker.leases.ask(consumer, lease.wants, lease.parked, lease.resumed, lease.route)
        # A lock counts when it is recorded.
        self._broker.answer_after_commit(lambda: connection.answer(correlation, m.Leased(*leased)))

    def _renew(self, connection: Connection, correlation: int, renew: m.Renew, _: memoryview) -> None:
        self._broker.leases.renew(renew.sessions)
        connection.answer(correlation, m.Done())

    def _detach(self, connection: Connection, correlation: int, detach: m.Detach, _: memoryview) -> None:
        consumer = connection.consumers.get(detach.session)
        if consumer is None:
            connection.answer(correlation, m.Done())
            return
        if consumer.session == detach.session:
            self._server.membership.detach(consumer)
        connection.gave_up(detach.session)
        self._broker.answer_after_commit(lambda: connection.answer(correlation, m.Done()))

    def _read(self, connection: Connection, correlation: int, read: m.Read, _: memoryview) -> None:
        names.check_partition(read.name)
        wait = _checked_wait(read.wait)
        # Reading makes no subject; where meta servers make them, the reader is to look at its route again.
        partition = self._broker.partition_of(read.name, create=self._broker.routed)
        start = resolve_start(partition, read.start)
        poll = connection.begin_poll(correlation, None)

        def reply(batch: Batch | None) -> None:
            if not connection.end_poll(poll):
                return
            if connection.writing_paused:
                # It asks again from here once it has taken what it was sent.
                batch = None
            position = start if batch is None else batch.end
            head = m.ReadReply(partition.id, partition.row.name, position)
            if batch is None or not batch.count:
                connection.answer(correlation, head)
            else:
                connection.answer(correlation, head, batch.parts, batch.size)

        self._broker.read(partition, start, read.count, read.size, wait, reply)
        self._server.arm_timer()

    def _admin(self, connection: Connection, correlation: int, request: m.Admin, _: memoryview) -> None:
        if self._server.cluster.take(connection, correlation, request):
            return
        if request.operation in admin_partition.ORDERS:
            admin_partition.order(
                self._server,
                request.operation,
                request.arguments,
                lambda result: self._answer_admin(connection, correlation, result),
            )
            return
        if request.operation in admin_stage.OPERATIONS:

            def answer(result: Any, error: PlaitError | None) -> None:
                if error is not None:
                    connection.fail(correlation, error)
                else:
                    self._answer_admin(connection, correlation, result)

            admin_stage.order(self._server, request.operation, request.arguments, answer)
            return
        result, changes = admin.run(self._server, request.operation, request.arguments)
        if changes:
            self._broker.answer_after_commit(lambda: self._answer_admin(connection, correlation, result))
        else:
            self._answer_admin(connection, correlation, result)

    @staticmethod
    def _answer_admin(connection: Connection, correlation: int, result: Any) -> None:
        connection.answer(correlation, m.AdminReply(msgspec.Raw(msgspec.msgpack.encode(result))))


def _bounded(
    ranges: list[m.EpochRange], most: int = REQUEST_RANGES_MAX, name: str = "REQUEST_RANGES_MAX"
) -> list[m.EpochRange]:
    """Ranges of one request, which are handled in one go: other clients wait meanwhile."""
    if len(ranges) > most:
        raise LimitExceeded(
            f"a request with {len(ranges)} ranges of messages is over the limit of {most} ({name}); send several",
            limit=name,
            value=most,
        )
    return ranges


def _checked(ranges: list[m.EpochRange]) -> list[m.EpochRange]:
    """Ranges as the broker takes them: of sequences, and none of them twice, so that its work is bounded by theirs."""
    for start, end, epoch in ranges:
        if not (0 <= start <= end < SEQUENCE_MAX and epoch >= 0):
            raise InvalidArgument(f"({start}, {end}, {epoch}) is not a range of sequences and an epoch")
    if len(ranges) < 2:
        return ranges
    merged: list[m.EpochRange] = []
    for start, end, epoch in sorted(ranges, key=lambda r: (r[2], r[0])):
        if merged and merged[-1][2] == epoch and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]), epoch)
        else:
            merged.append((start, end, epoch))
    return merged


def _with_tags(ranges: list[m.EpochRange], tags: list[int]) -> tuple[list[m.EpochRange], list[int]]:
    """Ranges as the broker takes them; those of one tag may not be joined with those of another."""
    if not tags:
        return _checked(ranges), []
    if len(tags) != len(ranges):
        raise InvalidArgument(f"{len(tags)} tags do not fit {len(ranges)} ranges")
    for each in ranges:
        _checked([each])
    return ranges, tags


def _checked_wait(seconds: float) -> float:
    if not seconds >= 0:
        raise InvalidArgument(f"a wait of {seconds} seconds is not possible; use 0 or more")
    return seconds
