"""One partition of an ordered consumer: asks for locks of logical partitions and pulls their rows.

It asks when the wanted locks change, when the broker reports a lock change, and after a third of the lease, which
renews the lease. Rows of LPs whose lock the consumer does not have are returned.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from plait.client.consume.ack_spool import AckSpool
from plait.client.consume.delivered import DeliveredFrame
from plait.client.consume.failure import UNBEGUN
from plait.client.consume.ordered.failed_keys import KeyHolds
from plait.client.consume.ordered.ordered_delivered import (
    BROKEN,
    RENEW_AT,
    LockRights,
    Numbers,
    OrderedDelivered,
    RenewedLease,
    no_lps,
)
from plait.client.consume.ordered.wanted_locks import WantedLocks, wants
from plait.client.consume.pull_client import Pull, PullClient
from plait.client.consume.row_runs import RowMask
from plait.client.consume.terms import Terms
from plait.client.net.node import ConsumerSession, Node
from plait.client.types import PartitionName
from plait.errors import PlaitError
from plait.frame.view import frames_in
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import LpSet
from plait.wire import messages as m
from plait.wire.link import Link

if TYPE_CHECKING:
    from plait.client.consume.ordered.ordered_fetcher import OrderedFetcher


class OrderedPullClient(PullClient):
    """A pull client that holds locks."""

    fetcher: OrderedFetcher

    def __init__(
        self,
        fetcher: OrderedFetcher,
        node: Node,
        terms: Terms,
        partition: PartitionName,
        spool: AckSpool | None,
    ) -> None:
        super().__init__(fetcher, node, terms, partition, spool)
        self._buffer = fetcher.buffer
        self._key_holds = self.collector.pending.holds = KeyHolds(self.deliveries, lambda: self._pull_number)
        self.rights = LockRights(fetcher.clock)
        self._token = self.rights.token
        #: The wanted locks.
        self._wanted: LpSet = no_lps()
        self._epochs: Numbers = np.zeros(LOGICAL_PARTITIONS, np.int64)
        #: The fence up to which each LP is wanted.
        self._until: Numbers = np.zeros(LOGICAL_PARTITIONS, np.int64)
        #: The route version that the wanted locks are derived from.
        self._route = 0
        #: Keys that an earlier partition parks.
        self._parked: set[int] = set()
        #: A lease request is in flight; the wanted locks have changed since it was sent.
        self._asking = False
        self._ask_again = False
        #: Replies to pulls that arrived before the reply to the lease request.
        self._early: list[Callable[[], None]] = []
        self._renewal: asyncio.TimerHandle | None = None

    # --- locks ----------------------------------------------------------------------------------

    def want(self, wanted: WantedLocks, epochs: Numbers, parked: set[int], route: int) -> None:
        """Set the wanted locks, derived from route version ``route``; give up all others."""
        lps, until = wanted
        changed = bool(
            (lps != self._wanted).any()
            or (epochs != self._epochs)[lps].any()
            or (until != self._until).any()
            or parked != self._parked
            or route != self._route
            or self._to_resume(lps, parked)
        )
        self._wanted, self._epochs, self._until, self._parked = lps, np.where(lps, epochs, 0), until, parked
        self._route = route
        if changed:
            given_up = self.rights.open & ~lps
            if given_up.any():
                self.rights.give_up(given_up)
                self._take_back_of(given_up)
            self.ask()

    def _to_resume(self, lps: LpSet, parked: set[int]) -> list[int]:
        """Inherited parked keys that no earlier partition parks any more."""
        return sorted(key for key in self.rights.inherited if key not in parked and lps[key % LOGICAL_PARTITIONS])

    def _take_back_of(self, lps: LpSet) -> None:
        """Return the rows of these LPs except those that the user holds."""
        masks: dict[DeliveredFrame, RowMask] = {}
        for delivered, start, stop in self.fetcher.take_back(self, lps):
            masks.setdefault(delivered, np.zeros(delivered.count, bool))[start:stop] = True
        self._give_up(masks)

    def _give_up(self, masks: Mapping[DeliveredFrame, RowMask]) -> None:
        if masks and not self.deliveries.closed:
            # Outcomes that other threads reported earlier take effect first.
            self.deliveries.absorb()
            for delivered, mask in masks.items():
                self.deliveries.collect_soon(delivered)
                delivered.nack_rows(mask, UNBEGUN)
            # Collected now, even if a request is in flight: later rows of the keys may arrive before the lock is back.
            self.collector.gather()

    def ask(self) -> None:
        """Ask for the wanted locks, which also renews the lease."""
        session = self.session
        if session is None or session.link.closed or self.fetcher.is_overdue():
            return
        if self._asking:
            self._ask_again = True
            return
        self._asking, self._ask_again = True, False
        asked = WantedLocks(self._wanted, self._until)
        request = m.LeaseRequest(
            session.number,
            wants(asked.lps, self._epochs, asked.until),
            sorted(self._parked),
            self._to_resume(self._wanted, self._parked),
            self._route,
        )
        session.link.call(request, functools.partial(self._leased, session, self.rights.clock.monotonic(), asked))

    def _leased(
        self,
        session: ConsumerSession,
        sent: float,
        asked: WantedLocks,
        answer: Any,
        _: memoryview,
        error: PlaitError | None,
    ) -> None:
        # Handled at once: rows of the granted locks may arrive in the next packet.
        if session is not self.session:
            return
        self._asking = False
        early, self._early = self._early, []
        self._take_leased(sent, asked, answer, error)
        for take in early:
            take()

    def _take_leased(self, sent: float, asked: WantedLocks, answer: Any, error: PlaitError | None) -> None:
        if error is not None:
            self._refused(error, self.ask)
            return
        rights = self.rights
        before = rights.done, rights.again, rights.parked, rights.inherited
        lost = rights.granted(answer, sent, asked.lps, asked.until, self._wanted)
        if lost.any():
            self._take_back_of(lost)
        self._renew_later()
        self._buffer.start_over()
        if (
            (before[0] is not rights.done and (before[0] != rights.done).any())
            or (before[1] is not rights.again and (before[1] != rights.again).any())
            or before[2:] != (rights.parked, rights.inherited)
        ):
            self.fetcher.want()
        if answer.refused:
            self.fetcher.ask_share_again()
        if self._ask_again:
            self.ask()
        self.fetcher.wake()
        self.pull()

    def _renew_later(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
        self._renewal = self._loop.call_later(self.rights.seconds * RENEW_AT, self._renew)

    def _renew(self) -> None:
        self.ask()
        # The timer also runs while the client is not attached, or may not renew.
        self._renew_later()

    # --- the lease renewer's thread -------------------------------------------------------------

    def lease(self) -> RenewedLease | None:
        """The lease to renew; None: none at present."""
        rights = self.rights
        if self.session is None or not rights.seconds or self.fetcher.is_overdue():
            return None
        return RenewedLease(tuple(self._node.addresses), rights.session, rights.token, rights.seconds)

    # --- sessions -------------------------------------------------------------------------------

    def _attached_as(self, attached: m.AttachReply) -> None:
        for delivered in self.deliveries.open:
            delivered.tag = 0
        self._key_holds.strict = self._buffer.strict = attached.strict
        self.rights.attached(attached)
        self._asking = False
        self._early = []
        self.fetcher.renewer.wake()
        self.ask()
        self._renew_later()

    def _drop_unstarted(self, link: Link) -> None:
        """If the lease has expired or the broker ended the session, drop the rows that no handler has begun."""
        if self._stale or not self.rights.valid():
            self._stale = False
            self.rights.give_up(self.rights.open)
            self._drop_unbegun()

    async def leave(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
        await super().leave()
        if self._renewal is not None:
            self._renewal.cancel()

    # --- rows -----------------------------------------------------------------------------------

    def _pulled(self, pull: Pull, answer: Any, payload: memoryview, error: PlaitError | None) -> None:
        if pull.session is not self.session:
            return
        news = error is None and answer.news > self.rights.news
        if news and not self._asking:
            # If a lease request is in flight, its reply covers the change, or the check after it does.
            self.ask()
        if self._asking and (news or (self._wanted & ~self.rights.open).any()):
            # The rows may belong to locks that the reply in flight grants.
            self._early.append(lambda: self._pulled(pull, answer, payload, error))
            return
        super()._pulled(pull, answer, payload, error)
        if self._key_holds.failing:
            self._key_holds.pulled(pull.number)

    def _take_in(self, answer: m.PullReply, payload: memoryview, number: int) -> None:
        for frame, attempts, tag in zip(frames_in(payload), answer.ranges, answer.tags, strict=True):
            frame.verify()
            delivered = OrderedDelivered(frame, self.terms.subject, self.partition, self.deliveries, [attempts])
            delivered.tag, delivered.rights, delivered.tracker = tag, self.rights, self._buffer
            self.deliveries.add(delivered)
            ours = np.flatnonzero(self.rights.open)
            if len(ours):
                # Rows without a key have no order: any lock of the consumer gives the right to handle them.
                delivered.lps[slice(None) if delivered.keyed is None else ~delivered.keyed] = ours[0]
            back = ~self.rights.open[delivered.lps]
            if self._key_holds.failing:
                back |= self._key_holds.held_back(delivered, number)
            returned = bool(back.any())
            if returned:
                delivered.states[back] = BROKEN
            self._buffer.append(delivered)
            if returned:
                self._give_up({delivered: back})
