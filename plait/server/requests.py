"""The requests of a broker: decoded packets to broker calls, results to replies."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from plait.broker.groups.group import AttachedConsumer, NackOutcome
from plait.broker.groups.group_settings import GroupFilter, resolve_start
from plait.broker.partitions.partition import ReadBatch
from plait.broker.transactions.transaction_requests import transaction_row
from plait.broker.transactions.transaction_table import StoredTransaction
from plait.errors import InvalidArgument, LimitExceeded, PlaitError, ProtocolError, StaleRoute, StaleSession
from plait.filter.message_filter import compile_filter
from plait.frame.header import SEQUENCE_MAX
from plait.frame.view import FrameView
from plait.limits import (
    CHECKS_SIZE_MAX,
    FAILED_RANGES_MAX,
    HALF_MESSAGES_SHOWN_MAX,
    LOGICAL_PARTITIONS,
    REQUEST_RANGES_MAX,
)
from plait.model import names
from plait.model.reason import Reason
from plait.model.retry_policy import ATTEMPTS_MAX, WAIT_SECONDS_MAX
from plait.model.settings import check_fair_by
from plait.server.broker_host import BrokerHost
from plait.server.cluster.cluster_role import ClusterRole
from plait.server.connection import ENDED, Connection
from plait.server.listener import Connections
from plait.server.operations.queries import Queries
from plait.server.operations.table import run
from plait.wire import messages as m
from plait.wire import query_messages as q
from plait.wire.admin.operation import answer


class Handlers:
    """Serves the requests of a broker's clients: one method per packet kind."""

    def __init__(self, host: BrokerHost, cluster: ClusterRole) -> None:
        self._host = host
        self._cluster = cluster
        self._broker = host.broker
        #: New partitions whose numbers are not yet committed.
        self._new: set[int] = set()

    def serve(self, connections: Connections) -> None:
        """Serve the requests of these connections."""
        connections.on_refusal = self._check_storage
        connections.handlers = {
            m.Hello.KIND: self._hello,
            m.HeartbeatRequest.KIND: self._heartbeat,
            m.PartitionNumberRequest.KIND: self._route,
            m.SendRequest.KIND: self._send,
            m.AttachRequest.KIND: self._attach,
            m.PullRequest.KIND: self._pull,
            m.AckRequest.KIND: self._ack,
            m.NackRequest.KIND: self._nack,
            m.DetachRequest.KIND: self._detach,
            m.LeaseRequest.KIND: self._lease,
            m.RenewRequest.KIND: self._renew,
            m.ReadRequest.KIND: self._read,
            q.QueryRequest.KIND: Queries(self._broker).serve,
            m.AdminRequest.KIND: self._admin,
            m.RouteRequest.KIND: self._find_route,
            m.MemberHeartbeatRequest.KIND: self._member_heartbeat,
            m.TransactionChecksRequest.KIND: self._transaction_checks,
        }

    def _check_storage(self) -> None:
        """Stop the server if the storage failed during a request."""
        if self._broker.turn.failed is not None:
            self._host.fail(self._broker.turn.failed)

    def _hello(self, connection: Connection, correlation: int, hello: m.Hello, _: memoryview) -> None:
        connection.pool.greet(connection, correlation, hello, self._broker.config.group, self._broker.turn.epoch)

    def _heartbeat(self, connection: Connection, correlation: int, _: m.HeartbeatRequest, __: memoryview) -> None:
        connection.touch()
        connection.answer(correlation, m.DoneReply())

    def _route(self, connection: Connection, correlation: int, route: m.PartitionNumberRequest, _: memoryview) -> None:
        names.check_partition(route.name)
        before = self._broker.catalog.next_partition
        partition = self._broker.partition_of(route.name)
        if route.delayed:
            partition = self._broker.schedules.partition_of(route.name)
        elif route.half:
            partition = self._broker.transactions.partition_of(route.name)
        number = m.PartitionNumberReply(partition.id, partition.row.name)
        if before == self._broker.catalog.next_partition and partition.id not in self._new:
            connection.answer(correlation, number)
            return

        def reply() -> None:
            self._new.discard(partition.id)
            connection.answer(correlation, number)

        # Reply after the commit: after a crash an uncommitted number is given to another subject.
        self._new.add(partition.id)
        self._broker.turn.answer_after_commit(reply)

    def _find_route(self, connection: Connection, correlation: int, find: m.RouteRequest, _: memoryview) -> None:
        if self._cluster.take(connection, correlation, find):
            return
        # Without a meta server the broker is the whole cluster.
        names.check("subject", find.subject)
        broker = self._broker
        row = broker.partition_of(find.subject, create=find.create).row
        group = broker.config.group
        route = m.RouteReply(
            find.subject,
            max(row.route, 1),
            row.settings.order,
            [(row.name, group)],
            [(0, LOGICAL_PARTITIONS, [(0, None)])],
            {group: ([self._host.address], "R" if broker.turn.read_only else "RW")},
        )
        broker.turn.answer_after_commit(partial(connection.answer, correlation, route))

    def _member_heartbeat(
        self, connection: Connection, correlation: int, heartbeat: m.MemberHeartbeatRequest, _: memoryview
    ) -> None:
        if not self._cluster.take(connection, correlation, heartbeat):
            raise InvalidArgument("this broker has no meta server, so it has no ordered groups")

    def _send(self, connection: Connection, correlation: int, send: m.SendRequest, payload: memoryview) -> None:
        partition = self._broker.partitions.get(send.partition)
        if partition is None:
            if send.oneway:
                return
            raise StaleRoute(f"this broker has no partition {send.partition}; refresh the route")
        size = len(payload)
        try:
            frame = FrameView(payload)
            if frame.size != size:
                raise ProtocolError(f"a send of {size} bytes contains a frame of {frame.size} bytes")
            if send.oneway:
                self._broker.submit(partition, frame, None)
                return
            self._broker.submit(partition, frame, partial(connection.answer_send, correlation, size))
            connection.in_flight += size
            if connection.in_flight > connection.pool.limits.in_flight_bytes_per_connection:
                connection.check_in_flight()
        except PlaitError:
            if send.oneway:
                return
            raise

    def _attach(self, connection: Connection, correlation: int, attach: m.AttachRequest, _: memoryview) -> None:
        names.check_partition(attach.name)
        names.check("client", attach.client)
        if attach.group is not None:
            names.check_group(attach.group)
        if attach.delivery not in ("at_least_once", "at_most_once"):
            raise InvalidArgument(f"delivery {attach.delivery!r} is not known; use 'at_least_once' or 'at_most_once'")
        if not 0 <= attach.began < SEQUENCE_MAX:
            raise InvalidArgument(f"began {attach.began} is not a version of a route")
        if not 0 <= attach.filter_version < SEQUENCE_MAX:
            raise InvalidArgument(f"filter_version {attach.filter_version} is not a version of a filter")
        consumer = self._host.membership.attach(
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
            wanted=GroupFilter(attach.filter, attach.states_filter, attach.filter_version),
            fair_by=None if attach.fair_by is None else check_fair_by(attach.fair_by),
        )
        connection.begin_session(consumer)
        connection.answer(correlation, self._attached(consumer, attach))

    def _attached(self, consumer: AttachedConsumer, attach: m.AttachRequest) -> m.AttachReply:
        group, partition = consumer.group, consumer.group.partition
        retry = group.retry
        # With an age limit any attempt may be the last, so the consumer reports a reason with each failure.
        reasons_from = 1 if retry.expires is not None else retry.attempts or ATTEMPTS_MAX
        return m.AttachReply(
            consumer.session,
            partition.id,
            partition.row.name,
            group.name,
            reasons_from,
            self._broker.leases.seconds if attach.ordered else 0.0,
            partition.row.settings.order == "strict" and not attach.affinity,
            retry.attempts or 0,
            group.definition.filter,
            group.definition.filter_version,
            partition.ranked or group.definition.fair_by is not None,
        )

    def _consumer(self, connection: Connection, session: int) -> AttachedConsumer:
        """The consumer that attached over this connection under the session. Raises ``StaleSession`` if it is lost."""
        consumer = self._broker.sessions.get(session) if session in connection.consumers else None
        if consumer is None:
            raise StaleSession(ENDED)
        consumer.last_contact = self._host.clock.monotonic()
        return consumer

    def _pull(self, connection: Connection, correlation: int, pull: m.PullRequest, _: memoryview) -> None:
        consumer = self._consumer(connection, pull.session)
        wait = pull.wait if pull.wait >= 0 else _checked_wait(pull.wait)
        polls = connection.begin_poll(correlation, pull.session)
        reply = partial(connection.answer_pull, correlation, consumer)
        try:
            deadline = self._broker.pull(consumer, pull.count, pull.size, wait, reply)
        except PlaitError:
            polls.pop(correlation, None)
            raise
        if deadline is not None and deadline < self._host.timer_at:
            self._host.arm_timer()

    def _ack(self, connection: Connection, correlation: int, ack: m.AckRequest, _: memoryview) -> None:
        consumer = self._consumer(connection, ack.session)
        if len(ack.ranges) > REQUEST_RANGES_MAX:
            _bounded(ack.ranges)
        ranges, tags = _with_tags(ack.ranges, ack.tags) if ack.tags else (_checked(ack.ranges), [])
        self._broker.ack(consumer, ranges, partial(connection.answer, correlation, m.DoneReply()), tags)

    def _nack(self, connection: Connection, correlation: int, nack: m.NackRequest, _: memoryview) -> None:
        consumer = self._consumer(connection, nack.session)
        _bounded([*nack.ranges, *nack.lp_ranges])
        if nack.counted:
            _bounded(nack.ranges, FAILED_RANGES_MAX, "FAILED_RANGES_MAX")
        delay = nack.delay
        if delay is not None and not 0 <= delay <= WAIT_SECONDS_MAX:
            raise InvalidArgument(f"a delay of {delay} seconds is invalid; use 0 to {WAIT_SECONDS_MAX:.0f}")
        if not nack.counted:
            # A consumer that returns rows must not receive them again at once.
            self._host.membership.end_pulls(consumer)
        failure = NackOutcome(delay, nack.reason or Reason(), nack.reject, nack.counted)
        ranges, tags = _with_tags(nack.ranges, nack.tags)
        if nack.lp_ranges:
            self._broker.leases.give_back(consumer, nack.lps, *_with_tags(nack.lp_ranges, nack.lp_tags))
        group, dead = consumer.group, consumer.group.died_count

        def reply() -> None:
            connection.answer(correlation, m.NackReply(died))

        self._broker.nack(consumer, ranges, reply, failure, tags)
        died = group.died_count - dead
        self._host.arm_timer()

    def _lease(self, connection: Connection, correlation: int, lease: m.LeaseRequest, _: memoryview) -> None:
        consumer = self._consumer(connection, lease.session)
        leased = self._broker.leases.ask(consumer, lease.wants, lease.parked, lease.resumed, lease.route)
        # A lock is granted when its event is committed.
        self._broker.turn.answer_after_commit(partial(connection.answer, correlation, m.LeaseReply(*leased)))

    def _renew(self, connection: Connection, correlation: int, renew: m.RenewRequest, _: memoryview) -> None:
        self._broker.leases.renew(renew.sessions)
        connection.answer(correlation, m.DoneReply())

    def _detach(self, connection: Connection, correlation: int, detach: m.DetachRequest, _: memoryview) -> None:
        consumer = connection.consumers.get(detach.session)
        if consumer is None:
            connection.answer(correlation, m.DoneReply())
            return
        if consumer.session == detach.session:
            self._host.membership.detach(consumer)
        connection.end_session(detach.session)
        self._broker.turn.answer_after_commit(partial(connection.answer, correlation, m.DoneReply()))

    def _read(self, connection: Connection, correlation: int, read: m.ReadRequest, _: memoryview) -> None:
        names.check_partition(read.name)
        wait = _checked_wait(read.wait)
        wanted = None if read.filter is None else compile_filter(read.filter)
        # A read creates no subject. In a cluster the missing partition makes the reader refresh its route.
        partition = self._broker.partition_of(read.name, create=self._broker.catalog.routed)
        start = resolve_start(partition, read.start)
        polls = connection.begin_poll(correlation)

        def reply(batch: ReadBatch) -> None:
            if polls.pop(correlation, None) is None:
                return
            if connection.writing_paused:
                # Send no rows: the client reads again from here after it has read its earlier replies.
                batch = ReadBatch(start)
            head = m.ReadReply(partition.id, partition.row.name, batch.end)
            if wanted is not None:
                missing = [*_expired(read.start, start), *batch.damaged]
                head = msgspec.structs.replace(head, more=batch.full, missing=missing)
            connection.answer(correlation, head, batch.parts, batch.size)

        try:
            self._broker.read(partition, start, read.count, read.size, wait, reply, wanted)
        except PlaitError:
            polls.pop(correlation, None)
            raise
        self._host.arm_timer()

    def _transaction_checks(
        self, connection: Connection, correlation: int, checks: m.TransactionChecksRequest, _: memoryview
    ) -> None:
        names.check_group(checks.producer_group)
        broker, wait = self._broker, min(_checked_wait(checks.wait), self._broker.limits.pull_wait_seconds)
        polls = connection.begin_poll(correlation)

        def reply(found: list[StoredTransaction]) -> bool:
            if polls.pop(correlation, None) is None:
                return False
            rows, room = [], CHECKS_SIZE_MAX
            for each in found:
                frames = broker.half_publisher.frames_of(each, HALF_MESSAGES_SHOWN_MAX, room)
                room -= sum(frame.size for _, frame in frames)
                rows.append(transaction_row(broker, each, frames))
            connection.answer(correlation, m.TransactionChecksReply(rows))
            return True

        try:
            broker.check_backs.poll(checks.producer_group, wait, reply)
        except PlaitError:
            polls.pop(correlation, None)
            raise
        self._host.arm_timer()

    def _admin(self, connection: Connection, correlation: int, request: m.AdminRequest, _: memoryview) -> None:
        if self._cluster.take(connection, correlation, request):
            return

        def reply(result: Any, error: PlaitError | None) -> None:
            if error is not None:
                connection.fail(correlation, error)
            else:
                connection.answer(correlation, answer(result))

        run(self._host, request, reply)


def _bounded(
    ranges: list[m.EpochRange], most: int = REQUEST_RANGES_MAX, name: str = "REQUEST_RANGES_MAX"
) -> list[m.EpochRange]:
    """Check the number of ranges. The ranges of one request are handled in one loop turn, so others wait for it."""
    if len(ranges) > most:
        raise LimitExceeded(
            f"a request with {len(ranges)} ranges of messages is over the limit of {most} ({name}); send several",
            limit=name,
            value=most,
        )
    return ranges


def _checked(ranges: list[m.EpochRange]) -> list[m.EpochRange]:
    """Check and merge ranges, so that no sequence occurs twice and the broker's work is bounded by their number."""
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
    """Check ranges and their tags. Ranges with tags are not merged."""
    if not tags:
        return _checked(ranges), []
    if len(tags) != len(ranges):
        raise InvalidArgument(f"{len(tags)} tags for {len(ranges)} ranges; give one tag per range")
    for each in ranges:
        _checked([each])
    return ranges, tags


def _expired(asked: m.Start, start: int) -> list[tuple[int, int]]:
    """The range between the sequence that a read asked for and the first one that is not expired."""
    return [(asked[1], start)] if isinstance(asked, tuple) and asked[0] == "sequence" and asked[1] < start else []


def _checked_wait(seconds: float) -> float:
    if not seconds >= 0:
        raise InvalidArgument(f"a wait of {seconds} seconds is invalid; use 0 or more")
    return seconds
