"""The ordered consumer: messages of one key are handled in order, different keys at the same time.

The meta server allocates logical partitions to the members of a group, but only a broker's lock gives the right to
handle them. Rows are handed out while the consumer has the lock; the rows of one key one after another.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import pairwise

import numpy as np

from plait.client.arguments import Duration, seconds_of
from plait.client.blocking.row_handover import RowHandover
from plait.client.consume.batch import report
from plait.client.consume.consumer import Consumer, Spools
from plait.client.consume.delivered import DeliveredFrame, Piece
from plait.client.consume.failure import UNBEGUN
from plait.client.consume.group_start import Terms
from plait.client.consume.ordered.lease_renewer import LeaseRenewer, RenewedLease
from plait.client.consume.ordered.lock_rights import LpEpochs, empty_report, grants_of, no_lps
from plait.client.consume.ordered.member_heartbeats import MemberHeartbeats
from plait.client.consume.ordered.ordered_buffer import OrderedBuffer
from plait.client.consume.ordered.ordered_delivered import OrderedDelivered
from plait.client.consume.ordered.ordered_pull import OrderedPullClient
from plait.client.consume.ordered.wanted_locks import left_behind, parked_before, wanted, wanted_at_once, with_passed
from plait.client.consume.prefetch import Prefetch
from plait.client.consume.pull_client import PullClient
from plait.client.net.router import Router, SubjectRoute
from plait.client.types import PartitionName
from plait.clock import Clock
from plait.errors import GroupMismatch, InvalidArgument, PlaitError
from plait.limits import LOGICAL_PARTITIONS, ClientLimits
from plait.model import names
from plait.model.logical_partitions import LpSet
from plait.wire import messages as m

log = logging.getLogger("plait.client")

EXCLUSIVE = "exclusive"
#: The only value of ``affinity=``.
KEY = "key"
#: How long a fetch that has rows waits for further rows from the brokers.
GATHER_SECONDS = 0.01


def check_ordered(
    ordered: bool, affinity: str | None, group: str | None, delivery: str, handling: Duration | None
) -> None:
    """Refuse combinations of arguments that contradict each other."""
    if not isinstance(ordered, bool):
        raise InvalidArgument(f"ordered must be True or False, not {ordered!r}")
    if affinity not in (None, KEY):
        raise InvalidArgument(f"affinity {affinity!r} is not known; use 'key'")
    if ordered and affinity:
        raise InvalidArgument("ordered=True already gives a key's messages to one member; leave out affinity='key'")
    if handling is not None:
        if not (ordered or affinity):
            raise InvalidArgument(
                "handling= applies to ordered=True and affinity='key' only: other consumers have no locks to lose"
            )
        if seconds_of(handling) <= 0:
            raise InvalidArgument(f"handling must be more than 0, not {handling!r}")
    if affinity and group is None:
        raise InvalidArgument("a broadcast cannot have affinity: every member gets every message")
    if affinity and delivery == "at_most_once":
        raise InvalidArgument(
            "at_most_once cannot have affinity: a key moves to another member when its messages are acked"
        )
    if not ordered:
        return
    if group is None:
        raise InvalidArgument("a broadcast cannot be ordered: every member gets every message, so no key has one owner")
    if delivery == "at_most_once":
        raise InvalidArgument(
            "at_most_once cannot be ordered: a message that is not acked cannot hold back the next one"
        )


class OrderedConsumer(Consumer):
    """A member of an ordered group or one with affinity. Leaving ``async with`` returns messages that are not acked."""

    _buffer: OrderedBuffer

    def __init__(
        self,
        router: Router,
        limits: ClientLimits,
        terms: Terms,
        *,
        heartbeats: MemberHeartbeats,
        renewer: LeaseRenewer,
        clock: Clock,
        handling: float,
        any_thread: bool = False,
        spools: Spools = lambda _: None,
    ) -> None:
        super().__init__(router, limits, terms, any_thread=any_thread, spools=spools)
        self._buffer = OrderedBuffer(self._wake)
        self._gather_seconds = GATHER_SECONDS
        self._handed_over = RowHandover(_may_go)
        # A row without an outcome holds back only its own key, so the span is not limited.
        self._prefetch = Prefetch(limits, spans=False)
        self._heartbeats = heartbeats
        self._renewer = renewer
        self._clock = clock
        self._handling = handling
        self._member = _Member(self)
        self._holders: dict[PullClient, _Holder] = {}
        #: The share allocated by the meta server, and the epoch of each LP.
        self._mine: LpSet = no_lps()
        self._epochs: LpEpochs = np.zeros(LOGICAL_PARTITIONS, np.int64)
        self._was_overdue = False
        #: The route of the last ``_want``, and for each partition the LPs that the route has moved on.
        self._route: SubjectRoute | None = None
        self._left_behind: list[LpSet] = []

    # --- opening and closing --------------------------------------------------------------------

    async def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        await super()._open(loop)
        await self._heartbeats.join(self._member)
        if self._error is not None:
            raise self._error

    async def _close(self) -> None:
        """Return the rows that no handler has begun, send the pending acks, leave the group and release all locks."""
        self._halt()
        if self._following and not any(client.collector.closed for client in self._clients):
            report([*self._handed_over.take_back(), *self._buffer.take_back()], UNBEGUN)
        await super()._close()
        for holder in self._holders.values():
            self._renewer.remove(holder)
        await self._heartbeats.leave(self._member)

    def _keep_locks(self) -> None:
        """Let ``close`` keep the locks, as a handler still runs that cannot be stopped. They expire with the lease."""
        log.warning(
            "%s: a handler did not end; other consumers take over its messages when the lease expires", self.subject
        )
        for client in self._clients:
            client.detaches = False

    def _new_client(self, route: SubjectRoute, partition: PartitionName, terms: Terms) -> PullClient:
        node = self._router.node(route, partition.group)
        spool = self._spools(partition)
        client = OrderedPullClient(self, node, self._limits, terms, partition, spool, any_thread=self._any_thread)
        holder = self._holders[client] = _Holder(self, client)
        self._renewer.add(holder)
        return client

    async def _left(self, client: PullClient) -> None:
        await super()._left(client)
        holder = self._holders.pop(client, None)
        if holder is not None:
            self._renewer.remove(holder)

    # --- share and locks ------------------------------------------------------------------------

    def _allocated(self, strategy: str, grants: list[m.LpGrant]) -> None:
        if strategy != EXCLUSIVE:
            self._fail(
                GroupMismatch(
                    f"group {self.group!r} of {self.subject!r} is not ordered: its members share messages, "
                    f"this one asks for {names.sharing(True, self._terms.affinity)}",
                    subject=self.subject,
                    group=self.group,
                    has="shared",
                    asked=names.sharing(True, self._terms.affinity),
                )
            )
            return
        mine, epochs = grants_of(grants)
        if (mine != self._mine).any() or (epochs != self._epochs).any():
            self._mine, self._epochs = mine, epochs
            self._want()

    def _follow(self, route: SubjectRoute | None) -> None:
        super()._follow(route)
        self._want()

    def _want(self) -> None:
        """Ask each partition for the locks of this share whose rows are next there; with affinity, for all locks."""
        route = self._router.known(self.subject)
        if route is None or self._stopping:
            return
        clients = {c.partition: c for c in self._clients if isinstance(c, OrderedPullClient)}
        listed = [clients.get(partition) for partition in route.partitions]
        reports = [empty_report() if client is None else client.rights.report() for client in listed]
        assert self.group is not None
        reports = with_passed(route, self.group, reports)
        affine = self._terms.affinity
        chosen = wanted_at_once(route, self._mine) if affine else wanted(route, self._mine, reports)
        before = parked_before(route, reports, chosen)
        if route is not self._route:
            self._route, self._left_behind = route, left_behind(route)
        for client, some, gone, keys in zip(listed, chosen, self._left_behind, before, strict=True):
            if client is not None:
                client.gated = no_lps() if affine else some.lps & gone
                client.want(some, self._epochs, keys, route.version)

    # --- how long messages take -----------------------------------------------------------------

    def _overdue(self) -> bool:
        """The user has held a message for longer than ``handling``."""
        oldest = self._buffer.oldest()
        return oldest is not None and self._clock.monotonic() - oldest > self._handling

    def _look_at_handling(self) -> None:
        """Warn once when the consumer becomes overdue; ask for its share again when that changes."""
        overdue = self._overdue()
        if overdue and not self._was_overdue:
            log.warning(
                "%s: a message has been handled for more than %g s; other consumers take over this consumer's messages",
                self.subject,
                self._handling,
            )
        if overdue != self._was_overdue:
            self._was_overdue = overdue
            self._ask_share_again()

    def _ask_share_again(self) -> None:
        """Ask the meta server for the share again: the one that this consumer has is out of date."""
        self._heartbeats.ask_again(self._member)

    # --- handing out ----------------------------------------------------------------------------

    def _put_back_handed_over(self) -> None:
        """Put rows taken for blocking callers back into the buffer: their locks may be lost before the callers ask."""
        self._buffer.put_back(self._handed_over.take_back())

    def _take_back(self, client: PullClient, lps: LpSet | None = None) -> list[Piece]:
        pieces = self._handed_over.take_back(client.partition)
        if lps is not None and pieces:
            pieces, others = _split(pieces, lps)
            self._handed_over.add(others)
        return [*pieces, *self._buffer.take_back(client.partition, lps)]


def _may_go(delivered: DeliveredFrame) -> bool:
    """The lease of the frame's locks is valid."""
    return isinstance(delivered, OrderedDelivered) and delivered.rights.valid()


def _split(pieces: list[Piece], lps: LpSet) -> tuple[list[Piece], list[Piece]]:
    """Split pieces into the rows of ``lps`` and the others."""
    chosen: list[Piece] = []
    others: list[Piece] = []
    for delivered, start, stop in pieces:
        assert isinstance(delivered, OrderedDelivered)
        mask = lps[delivered.lps[start:stop]]
        edges = [start, *(np.flatnonzero(np.diff(mask)) + start + 1).tolist(), stop]
        for first, end in pairwise(edges):
            (chosen if mask[first - start] else others).append((delivered, first, end))
    return chosen, others


class _Member:
    """The ``GroupMember`` that ``MemberHeartbeats`` sees of a consumer."""

    def __init__(self, consumer: OrderedConsumer) -> None:
        self._consumer = consumer
        self.subject = consumer.subject
        self.client_id = consumer.client_id
        self.affinity = consumer._terms.affinity

    @property
    def group_name(self) -> str:
        assert self._consumer.group is not None
        return self._consumer.group

    def overdue(self) -> bool:
        self._consumer._look_at_handling()
        return self._consumer._was_overdue

    def is_overdue(self) -> bool:
        return self._consumer._overdue()

    def allocated(self, strategy: str, grants: list[m.LpGrant]) -> None:
        self._consumer._allocated(strategy, grants)

    def give_up(self, error: PlaitError) -> None:
        self._consumer._fail(error)


class _Holder:
    """The lease of one partition, for the lease renewer."""

    def __init__(self, consumer: OrderedConsumer, client: OrderedPullClient) -> None:
        self._consumer = consumer
        self._client = client

    def lease(self) -> RenewedLease | None:
        client, rights = self._client, self._client.rights
        if not client.attached or not rights.seconds or self._consumer._overdue():
            return None
        return RenewedLease(tuple(client.addresses), rights.session, rights.token, rights.seconds)

    def renewed(self, session: int, sent: float) -> None:
        self._client.rights.renewed(session, sent)
