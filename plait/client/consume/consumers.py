"""The consumers of one client, with the heartbeats and the lease renewer that the ordered ones share."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec

from plait.client.arguments import seconds_of, start_of
from plait.client.closing import all_of
from plait.client.consume.ack_spool import AckSpool
from plait.client.consume.consumer import Consumer
from plait.client.consume.fetcher import Fetcher
from plait.client.consume.ordered.lease_renewer import Background, BackgroundThread, LeaseRenewer
from plait.client.consume.ordered.member_heartbeats import MemberHeartbeats
from plait.client.consume.ordered.ordered_fetcher import OrderedFetcher
from plait.client.consume.terms import ConsumerArguments, Terms
from plait.client.net.router import Router
from plait.client.types import PartitionName
from plait.clock import Clock, SystemClock
from plait.errors import InvalidArgument
from plait.limits import ClientLimits


class Consumers:
    """Makes the consumers of a client, and closes them with it."""

    def __init__(self, router: Router, client_id: str, limits: ClientLimits, spool: Path | None) -> None:
        self._router = router
        self._client_id = client_id
        self._limits = limits
        self._spool = spool
        #: In the order of their creation.
        self._consumers: weakref.WeakKeyDictionary[Consumer, None] = weakref.WeakKeyDictionary()
        #: The clock that measures leases.
        self.clock: Clock = SystemClock()
        self.heartbeats = MemberHeartbeats(router, limits, lambda: self.clock.monotonic())
        #: Makes the thread that renews leases while the user's loop is busy.
        self.background: Callable[[], Background] = BackgroundThread
        self.renewer: LeaseRenewer | None = None

    def new(self, arguments: ConsumerArguments, now: int, *, any_thread: bool) -> Consumer:
        """A consumer, whose messages may be acked from ``any_thread``."""
        group, mode = arguments.checked()
        subject, prefetch, handling = arguments.subject, arguments.prefetch, arguments.handling
        limits = self._limits
        if prefetch is not None:
            if prefetch < 1:
                raise InvalidArgument(f"prefetch must be 1 or more, not {prefetch}")
            span = max(2 * prefetch, 2)
            limits = msgspec.structs.replace(limits, prefetch_count=prefetch, prefetch_span=span)
        member = self._member_id(subject, group)
        begin = start_of(arguments.start, now)
        terms = Terms(subject, group, member, begin, arguments.delivery, mode, arguments.retry)

        def spools(partition: PartitionName) -> AckSpool | None:
            return None if self._spool is None else AckSpool(self._spool, subject, group or "", member, str(partition))

        if mode.locks:
            self.renewer = self.renewer or LeaseRenewer(
                self._client_id, self._limits, self.clock, self.heartbeats, self.background
            )
            fetcher: Fetcher = OrderedFetcher(
                self._router,
                limits,
                terms,
                heartbeats=self.heartbeats,
                renewer=self.renewer,
                clock=self.clock,
                handling=limits.handling_seconds if handling is None else seconds_of(handling),
                any_thread=any_thread,
                spools=spools,
            )
        else:
            fetcher = Fetcher(self._router, limits, terms, any_thread=any_thread, spools=spools)
        consumer = Consumer(fetcher)
        consumer._after = [c for c in self._consumers if (c.subject, c.group, c.client_id) == (subject, group, member)]
        self._consumers[consumer] = None
        return consumer

    def _member_id(self, subject: str, group: str | None) -> str:
        """The client id; a further consumer of the same group in this client gets the id with a number appended.

        The id of a closing consumer can be used again: its successor waits until it is closed.
        """
        members = [c for c in self._consumers if (c.subject, c.group) == (subject, group)]
        taken = {c.client_id for c in members if not c._closing.begun}
        number, member = 1, self._client_id
        while member in taken:
            number += 1
            member = f"{self._client_id}:{number}"
        return member

    async def close(self) -> None:
        """Close all consumers, then the lease renewer."""
        try:
            await all_of([consumer.close() for consumer in list(self._consumers)])
            self._consumers.clear()
        finally:
            if self.renewer is not None:
                await self.renewer.close()

    def abandon(self) -> None:
        """Called in a forked child, which must not touch the lease renewer's thread."""
        if self.renewer is not None:
            self.renewer.abandon()
