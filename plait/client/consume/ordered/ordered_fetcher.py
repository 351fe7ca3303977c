"""The fetcher of an ordered consumer: messages of one key are handled in order, different keys at the same time.

The meta server allocates logical partitions to the members of a group, but only a broker's lock gives the right to
handle them. Rows are handed out while the consumer has the lock; the rows of one key one after another.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import pairwise

import numpy as np

from plait.client.blocking.row_handover import RowHandover
from plait.client.consume.delivered import DeliveredFrame, Piece
from plait.client.consume.fetcher import CommonState, Fetcher, Spools
from plait.client.consume.ordered.lease_renewer import LeaseRenewer
from plait.client.consume.ordered.member_heartbeats import MemberHeartbeats
from plait.client.consume.ordered.ordered_buffer import OrderedBuffer
from plait.client.consume.ordered.ordered_delivered import LockRights, Numbers, OrderedDelivered, grants_of, no_lps
from plait.client.consume.ordered.ordered_pull import OrderedPullClient
from plait.client.consume.ordered.wanted_locks import (
    LockReport,
    empty_report,
    left_behind,
    parked_before,
    wanted,
    wanted_at_once,
    with_passed,
)
from plait.client.consume.pull_client import PullClient
from plait.client.consume.terms import Terms
from plait.client.net.router import Router, SubjectRoute
from plait.client.types import PartitionName
from plait.clock import Clock
from plait.errors import GroupMismatch
from plait.limits import LOGICAL_PARTITIONS, ClientLimits
from plait.model import names
from plait.model.logical_partitions import LpSet
from plait.model.settings import ShareMode
from plait.wire import messages as m

log = logging.getLogger("plait.client")

EXCLUSIVE = "exclusive"
#: How long a fetch that has rows waits for further rows from the brokers.
GATHER_SECONDS = 0.01


class OrderedFetcher(Fetcher):
    """The partitions of an ordered consumer or one with affinity. It is the ``GroupMember`` of the heartbeats."""

    buffer: OrderedBuffer

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
        common: CommonState | None = None,
    ) -> None:
        super().__init__(router, limits, terms, any_thread=any_thread, spools=spools, common=common)
        assert terms.group is not None
        self.group_name = terms.group
        self.client_id = terms.client
        self.affinity = terms.mode is ShareMode.AFFINITY
        self.creates = terms.creates
        self.buffer = OrderedBuffer(self.wake, self.waiting)
        self.gather_seconds = GATHER_SECONDS
        self.handed_over = RowHandover(may_go) if common is None else common.handed_over
        # A row without an outcome holds back only its own key, so the span is not limited.
        self.spans = False
        self._heartbeats = heartbeats
        self.renewer = renewer
        self.clock = clock
        self._handling = handling
        #: The share allocated by the meta server, and the epoch of each LP.
        self._mine: LpSet = no_lps()
        self._epochs: Numbers = np.zeros(LOGICAL_PARTITIONS, np.int64)
        self._was_overdue = False
        #: The route of the last ``want``, and for each partition the LPs that the route has moved on.
        self._route: SubjectRoute | None = None
        self._left_behind: list[LpSet] = []

    # --- opening and closing --------------------------------------------------------------------

    async def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        known = self.router.known(self.subject)
        if known is not None and known.passed:
            # A rewind may have brought back rows of spans that the group had finished when the route was cached.
            await self.refresh_route()
        await super().attach(loop)
        await self._heartbeats.join(self)
        if self.error is not None:
            raise self.error

    async def send_outcomes(self) -> None:
        if self.following:
            self.hand_back()
        await super().send_outcomes()

    async def leave(self) -> None:
        """Return the rows that no handler has begun, leave the group and release all locks."""
        await super().leave()
        for client in self._ordered_clients():
            self.renewer.remove(client)
        await self._heartbeats.leave(self)

    def keep_locks(self) -> None:
        """Let ``leave`` keep the locks, as a handler still runs that cannot be stopped. They expire with the lease."""
        log.warning(
            "%s: a handler did not end; other consumers take over its messages when the lease expires", self.subject
        )
        for client in self.clients:
            client.detaches = False

    def _new_client(self, route: SubjectRoute, partition: PartitionName, terms: Terms) -> PullClient:
        node = self.router.node(route, partition.group)
        client = OrderedPullClient(self, node, terms, partition, self._spools(partition))
        self.renewer.add(client)
        return client

    async def _leave(self, client: PullClient) -> None:
        await super()._leave(client)
        assert isinstance(client, OrderedPullClient)
        self.renewer.remove(client)

    def _ordered_clients(self) -> list[OrderedPullClient]:
        return [client for client in self.clients if isinstance(client, OrderedPullClient)]

    # --- share and locks ------------------------------------------------------------------------

    def allocated(self, strategy: str, grants: list[m.LpGrant]) -> None:
        """Ask for the locks of the LPs that the meta server has allocated to this member."""
        if strategy != EXCLUSIVE:
            asked = names.sharing(True, self.affinity)
            self.fail(
                GroupMismatch(
                    f"group {self.group_name!r} of {self.subject!r} is not ordered: its members share messages, "
                    f"this one asks for {asked}",
                    subject=self.subject,
                    group=self.group_name,
                    has="shared",
                    asked=asked,
                )
            )
            return
        mine, epochs = grants_of(grants)
        if (mine != self._mine).any() or (epochs != self._epochs).any():
            self._mine, self._epochs = mine, epochs
            self.want()

    def follow(self, route: SubjectRoute | None) -> None:
        super().follow(route)
        self.want()

    def want(self) -> None:
        """Ask each partition for the locks of this share whose rows are next there; with affinity, for all locks."""
        route = self.router.known(self.subject)
        if route is None or self.stopping:
            return
        clients = {client.partition: client for client in self._ordered_clients()}
        listed = [clients.get(partition) for partition in route.partitions]
        reports = [empty_report() if client is None else _report_of(client.rights) for client in listed]
        reports = with_passed(route, self.group_name, reports)
        chosen = wanted_at_once(route, self._mine) if self.affinity else wanted(route, self._mine, reports)
        before = parked_before(route, reports, chosen)
        if route is not self._route:
            self._route, self._left_behind = route, left_behind(route)
        for client, some, gone, keys in zip(listed, chosen, self._left_behind, before, strict=True):
            if client is not None:
                # An LP that the route has moved on may be drained here when the broker has stored outcomes.
                gated = not self.affinity and bool((some.lps & gone).any())
                client.collector.on_stored = client.ask if gated else None
                client.want(some, self._epochs, keys, route.version)

    # --- how long messages take -----------------------------------------------------------------

    def is_overdue(self) -> bool:
        """True if the user has held a message for longer than ``handling``. May be called from any thread."""
        oldest = self.buffer.held.oldest()
        return oldest is not None and self.clock.monotonic() - oldest > self._handling

    def overdue(self) -> bool:
        """``is_overdue``; warns when the consumer becomes overdue, and asks for its share again when that changes."""
        overdue = self.is_overdue()
        if overdue and not self._was_overdue:
            log.warning(
                "%s: a message has been handled for more than %g s; other consumers take over this consumer's messages",
                self.subject,
                self._handling,
            )
        if overdue != self._was_overdue:
            self._was_overdue = overdue
            self.ask_share_again()
        return overdue

    def ask_share_again(self) -> None:
        self._heartbeats.ask_again(self)

    # --- handing out ----------------------------------------------------------------------------

    def put_back_handed_over(self) -> None:
        """Put rows taken for blocking callers back into the buffer: their locks may be lost before the callers ask."""
        for client in self.clients:
            self.buffer.put_back(self.handed_over.take_back(client.partition))

    def take_back(self, client: PullClient, lps: LpSet | None = None) -> list[Piece]:
        pieces = self.handed_over.take_back(client.partition)
        if lps is not None and pieces:
            pieces, others = _split(pieces, lps)
            self.handed_over.add(others)
        return [*pieces, *self.buffer.take_back(client.partition, lps)]


def _report_of(rights: LockRights) -> LockReport:
    return LockReport(rights.done, rights.parked, rights.inherited, rights.again)


def may_go(delivered: DeliveredFrame) -> bool:
    """Whether a row of the frame may be handed to the user now."""
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
