"""The consumers of one client, with the heartbeats and the lease renewer that the ordered ones share."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec

from plait.client.arguments import seconds_of, start_of
from plait.client.closing import all_of
from plait.client.consume.ack_spool import AckSpool
from plait.client.consume.consumer import Consumer
from plait.client.consume.fetcher import CommonState, Fetcher
from plait.client.consume.ordered.lease_renewer import Background, BackgroundThread, LeaseRenewer
from plait.client.consume.ordered.member_heartbeats import MemberHeartbeats
from plait.client.consume.ordered.ordered_fetcher import OrderedFetcher
from plait.client.consume.several.several_fetcher import SeveralFetcher
from plait.client.consume.terms import ConsumerArguments, Terms
from plait.client.net.router import Router
from plait.client.types import PartitionName, SendReply
from plait.clock import Clock, SystemClock
from plait.errors import InvalidArgument
from plait.limits import ClientLimits
from plait.model.subject_patterns import SubjectPatterns


class Consumers:
    """Makes the consumers of a client, and closes them with it."""

    def __init__(self, router: Router, client_id: str, limits: ClientLimits, spool: Path | None) -> None:
        self._router = router
        self._client_id = client_id
        self._limits = limits
        self._spool = spool
        #: The consumers and their subjects, in the order of their creation.
        self._consumers: weakref.WeakKeyDictionary[Consumer, SubjectPatterns] = weakref.WeakKeyDictionary()
        #: The clock that measures leases.
        self.clock: Clock = SystemClock()
        self.heartbeats = MemberHeartbeats(router, limits, lambda: self.clock.monotonic())
        #: Makes the thread that renews leases while the user's loop is busy.
        self.background: Callable[[], Background] = BackgroundThread
        self.renewer: LeaseRenewer | None = None
        #: Sends replies to requests that the consumers got; the client sets it.
        self.reply: SendReply | None = None

    def new(self, arguments: ConsumerArguments, now: int, *, any_thread: bool) -> Consumer:
        """A consumer, whose messages may be acked from ``any_thread``."""
        group, mode = arguments.checked()
        patterns, prefetch, handling = arguments.subjects, arguments.prefetch, arguments.handling
        limits = self._limits
        if prefetch is not None:
            if prefetch < 1:
                raise InvalidArgument(f"prefetch must be 1 or more, not {prefetch}")
            span = max(2 * prefetch, 2)
            limits = msgspec.structs.replace(limits, prefetch_count=prefetch, prefetch_span=span)
        member = self._member_id(patterns, group)
        begin = start_of(arguments.start, now)
        terms = Terms(str(patterns), group, member, begin, arguments.delivery, mode, arguments.retry)
        terms = terms._replace(filter=arguments.filter, states_filter=arguments.filter is not None)
        terms = terms._replace(fair_by=arguments.fair_by)
        seconds = limits.handling_seconds if handling is None else seconds_of(handling)
        make = functools.partial(self._fetcher, limits, seconds, any_thread)
        consumer = Consumer(
            make(terms) if patterns.single else SeveralFetcher(self._router, limits, terms, patterns, make)
        )
        consumer._after = [c for c in self._members(patterns, group) if c.client_id == member]
        self._consumers[consumer] = patterns
        return consumer

    def _fetcher(
        self, limits: ClientLimits, handling: float, any_thread: bool, terms: Terms, common: CommonState | None = None
    ) -> Fetcher:
        """The fetcher of one subject."""

        def spools(partition: PartitionName) -> AckSpool | None:
            if self._spool is None:
                return None
            return AckSpool(self._spool, terms.subject, terms.group or "", terms.client, str(partition))

        if not terms.mode.locks:
            shared = Fetcher(self._router, limits, terms, any_thread=any_thread, spools=spools, common=common)
            shared.reply = self.reply
            return shared
        self.renewer = self.renewer or LeaseRenewer(
            self._client_id, self._limits, self.clock, self.heartbeats, self.background
        )
        ordered = OrderedFetcher(
            self._router,
            limits,
            terms,
            heartbeats=self.heartbeats,
            renewer=self.renewer,
            clock=self.clock,
            handling=handling,
            any_thread=any_thread,
            spools=spools,
            common=common,
        )
        ordered.reply = self.reply
        return ordered

    def _members(self, patterns: SubjectPatterns, group: str | None) -> list[Consumer]:
        """The consumers of the group that may have a subject in common with the patterns."""
        return [c for c, others in self._consumers.items() if c.group == group and others.overlaps(patterns)]

    def _member_id(self, patterns: SubjectPatterns, group: str | None) -> str:
        """The client id; a further consumer of the same group in this client gets the id with a number appended.

        The id of a closing consumer can be used again: its successor waits until it is closed.
        """
        members = self._members(patterns, group)
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
