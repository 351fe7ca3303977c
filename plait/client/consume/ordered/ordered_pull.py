"""One partition of an ordered consumer: asks for locks of logical partitions and pulls their rows.

It asks when the wanted locks change, when the broker reports a lock change, and after a third of the lease, which
renews the lease. Rows of LPs whose lock the consumer does not have are returned.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from plait.client.consume.ack_collector import AckCollector
from plait.client.consume.ack_spool import AckSpool
from plait.client.consume.delivered import DeliveredFrame
from plait.client.consume.failure import UNBEGUN, EpochRange
from plait.client.consume.ordered.lock_rights import LockRights, LpEpochs, Numbers, no_lps
from plait.client.consume.ordered.ordered_buffer import OrderedBuffer
from plait.client.consume.ordered.ordered_delivered import BROKEN, OrderedDelivered, RowMask, mask_of, rows_of
from plait.client.consume.ordered.ordered_pending import OrderedPending
from plait.client.consume.ordered.wanted_locks import WantedLocks, wants
from plait.client.consume.pull_client import Feed, PullClient, Terms
from plait.client.net.node import Node
from plait.client.types import PartitionName
from plait.clock import Clock
from plait.errors import PlaitError, StaleSession, Unavailable
from plait.frame.view import frames_in
from plait.limits import LOGICAL_PARTITIONS, ClientLimits
from plait.model.logical_partitions import LpSet
from plait.wire import messages as m
from plait.wire.link import Link

#: The fraction of a lease after which it is renewed.
RENEW_AT = 1 / 3


class OrderedPullClient(PullClient):
    """A pull client that holds locks."""

    def __init__(
        self,
        feed: Feed,
        node: Node,
        limits: ClientLimits,
        terms: Terms,
        partition: PartitionName,
        kind: type[DeliveredFrame],
        spool: AckSpool | None,
        buffer: OrderedBuffer,
        clock: Clock,
        drained: Callable[[], None],
        refused: Callable[[], None],
        may_renew: Callable[[], bool],
        leased: Callable[[], None],
    ) -> None:
        super().__init__(feed, node, limits, terms, partition, kind, spool)
        self._buffer = buffer
        self._pending = OrderedPending(lambda: self.open, lambda: self._pull_number)
        self.collector = AckCollector(self, limits, spool, self._pending)
        self.rights = LockRights(clock)
        self._drained = drained
        self._refused = refused
        self._may_renew = may_renew
        self._new_lease = leased
        #: The wanted locks.
        self._wanted: LpSet = no_lps()
        self._epochs: LpEpochs = np.zeros(LOGICAL_PARTITIONS, np.int64)
        #: The fence up to which each LP is wanted.
        self._until: Numbers = np.zeros(LOGICAL_PARTITIONS, np.int64)
        #: The route version that the wanted locks are derived from.
        self._route = 0
        #: Wanted LPs that the route has moved on: the consumer follows once they are drained here.
        self.gated: LpSet = no_lps()
        #: Keys that an earlier partition parks.
        self._parked: set[int] = set()
        #: A lease request is in flight; the wanted locks have changed since it was sent.
        self._asking = False
        self._ask_again = False
        #: Replies to pulls that arrived before the reply to the lease request.
        self._early: list[Callable[[], None]] = []
        self._renewal: asyncio.TimerHandle | None = None

    @property
    def addresses(self) -> list[str]:
        """The addresses of the partition's broker."""
        return self._node.addresses

    # --- locks ----------------------------------------------------------------------------------

    def want(self, wanted: WantedLocks, epochs: LpEpochs, parked: set[int], route: int) -> None:
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
            self._withdraw(self.rights.open & ~lps)
            self.ask()

    def _to_resume(self, lps: LpSet, parked: set[int]) -> list[int]:
        """Inherited parked keys that no earlier partition parks any more."""
        return sorted(key for key in self.rights.inherited if key not in parked and lps[key % LOGICAL_PARTITIONS])

    def _withdraw(self, lps: LpSet) -> None:
        """Give up these locks, and return their rows except those that the user holds."""
        if lps.any():
            self.rights.give_up(lps)
            self._take_back_of(lps)

    def _take_back_of(self, lps: LpSet) -> None:
        runs: dict[DeliveredFrame, list[EpochRange]] = {}
        for delivered, start, stop in self._feed.take_back(self, lps):
            runs.setdefault(delivered, []).append((start, stop, 0))
        self._give_up({delivered: mask_of(rows_of(some), delivered.count) for delivered, some in runs.items()})

    def _give_up(self, masks: Mapping[DeliveredFrame, RowMask]) -> None:
        if masks and not self.collector.closed:
            # Outcomes that other threads reported earlier count first.
            self.collector.absorb()
            for delivered, mask in masks.items():
                self.collector.collect_soon(delivered)
                delivered.nack_rows(mask, UNBEGUN)
            # Collected now, even if a request is in flight: later rows of the keys may arrive before the lock is back.
            self.collector.gather()

    def ask(self) -> None:
        """Ask for the wanted locks, which also renews the lease."""
        link = self._link
        if not self.attached or link is None or link.closed or not self._may_renew():
            return
        if self._asking:
            self._ask_again = True
            return
        self._asking, self._ask_again = True, False
        asked = WantedLocks(self._wanted, self._until)
        request = m.LeaseRequest(
            self._session,
            wants(asked.lps, self._epochs, asked.until),
            sorted(self._parked),
            self._to_resume(self._wanted, self._parked),
            self._route,
        )
        link.call(request, functools.partial(self._leased, self._session, self.rights.now(), asked))

    def _leased(
        self, session: int, sent: float, asked: WantedLocks, answer: Any, _: memoryview, error: PlaitError | None
    ) -> None:
        # Handled at once: rows of the granted locks may arrive in the next packet.
        if session != self._session or not self.attached:
            return
        self._asking = False
        assert self._loop is not None
        early, self._early = self._early, []
        self._take_leased(sent, asked, answer, error)
        for take in early:
            take()

    def _take_leased(self, sent: float, asked: WantedLocks, answer: Any, error: PlaitError | None) -> None:
        assert self._loop is not None
        if error is not None:
            if isinstance(error, StaleSession | Unavailable):
                self._lose(stale=isinstance(error, StaleSession))
            elif error.retryable:
                self._loop.call_later(self._limits.reconnect_max_seconds, self.ask)
            else:
                self._feed.failed(error)
            return
        rights = self.rights
        before = rights.done, rights.again, rights.parked, rights.inherited
        lost = self.rights.granted(answer, sent, asked.lps, asked.until, self._wanted)
        if lost.any():
            self._take_back_of(lost)
        self._renew_later()
        self._buffer.renewed()
        if (
            (before[0] is not rights.done and (before[0] != rights.done).any())
            or (before[1] is not rights.again and (before[1] != rights.again).any())
            or before[2:] != (rights.parked, rights.inherited)
        ):
            self._drained()
        if answer.refused:
            self._refused()
        if self._ask_again:
            self.ask()
        self._feed.news()
        self.pull()

    def _renew_later(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
        assert self._loop is not None
        self._renewal = self._loop.call_later(self.rights.seconds * RENEW_AT, self._renew)

    def _renew(self) -> None:
        self.ask()
        # The timer also runs while the client is not attached, or may not renew.
        self._renew_later()

    # --- sessions -------------------------------------------------------------------------------

    def _token(self) -> int:
        return self.rights.token

    def _attached_as(self, attached: m.AttachReply, link: Link) -> None:
        for delivered in self.open:
            assert isinstance(delivered, OrderedDelivered)
            delivered.tag = 0
        self._pending.strict = self._buffer.strict = attached.strict
        self.rights.attached(attached)
        self._asking = False
        self._early = []
        self._new_lease()
        self.ask()
        self._renew_later()

    def _drop_unstarted(self, link: Link, loop: asyncio.AbstractEventLoop) -> None:
        """If the lease has expired or the broker ended the session, drop the rows that no handler has begun."""
        if self._stale or not self.rights.valid():
            self._stale = False
            self.rights.give_up(self.rights.open)
            self._drop(self._feed.take_back(self))

    def _unbegun(self) -> list[EpochRange]:
        ranges: list[EpochRange] = []
        for delivered, start, stop in self._feed.take_back(self):
            assert isinstance(delivered, OrderedDelivered)
            mask = np.zeros(delivered.count, bool)
            mask[start:stop] = True
            runs = delivered.close_rows(mask)
            ranges += [piece for first, end, _ in runs for piece in delivered.plain(np.arange(first, end))]
        return ranges

    async def leave(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
        await super().leave()
        if self._renewal is not None:
            self._renewal.cancel()

    # --- rows -----------------------------------------------------------------------------------

    def _pulled(
        self, session: int, count: int, number: int, answer: Any, payload: memoryview, error: PlaitError | None
    ) -> None:
        if session != self._session or not self.attached:
            return
        news = error is None and answer.news > self.rights.news
        if news and not self._asking:
            # If a lease request is in flight, its reply covers the change, or the check after it does.
            self.ask()
        if self._asking and (news or (self._wanted & ~self.rights.open).any()):
            # The rows may belong to locks that the reply in flight grants.
            self._early.append(lambda: self._pulled(session, count, number, answer, payload, error))
            return
        super()._pulled(session, count, number, answer, payload, error)
        self._pending.failing = [failing for failing in self._pending.failing if not failing.in_order(number)]

    def _take_in(self, answer: m.PullReply, payload: memoryview, number: int) -> None:
        for frame, attempts, tag in zip(frames_in(payload), answer.ranges, answer.tags, strict=True):
            frame.verify()
            delivered = self._kind(frame, self._terms.subject, self.partition, self.collector, [attempts])
            assert isinstance(delivered, OrderedDelivered)
            delivered.tag = tag
            delivered.rights = self.rights
            delivered.tracker = self._buffer
            self._opened(delivered)
            self._place_keyless(delivered)
            back = self._not_ours(delivered, number)
            if back.any():
                delivered.states[back] = BROKEN
            self._feed.buffer.append(delivered)
            if back.any():
                self._give_up({delivered: back})

    def _place_keyless(self, delivered: OrderedDelivered) -> None:
        """Assign rows without a key, which have no order, to any LP whose lock the consumer has."""
        ours = np.flatnonzero(self.rights.open)
        if len(ours):
            keyless = slice(None) if delivered.keyed is None else ~delivered.keyed
            delivered.lps[keyless] = ours[0]

    def _not_ours(self, delivered: OrderedDelivered, number: int) -> RowMask:
        """Rows to return: without a lock, or after a failed row of their key that is not redelivered yet."""
        back: RowMask = ~self.rights.open[delivered.lps]
        for failing in self._pending.failing:
            if not failing.in_order(number):
                failing.redelivered(delivered)
                behind = failing.behind(delivered)
                if behind is not None:
                    back |= behind
        return back

    # --- outcomes -------------------------------------------------------------------------------

    def outcomes_stored(self) -> None:
        """The broker has stored the outcomes that were sent."""
        if self.gated.any():
            # An older span may be drained now.
            self.ask()
