"""Defects that Plait's classes once had. Tests patch them into a simulated world or cluster, one at a time.

Each patches one method, so that ``tests/plants`` can check that the generator finds the defect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plait.broker.groups.at_most_once import AtMostOnceGroup
from plait.broker.partitions import filtered_read
from plait.broker.partitions import sealing as passed
from plait.broker.partitions.partition import Partition, ReadBatch
from plait.broker.retention import Retention
from plait.client.app.subscription import Subscription
from plait.client.closing import Closing
from plait.client.consume import fetcher
from plait.client.consume.several.several_fetcher import SeveralFetcher
from plait.client.requests.requester import Requester
from plait.client.send.producer import Producer
from plait.errors import CodecError
from plait.meta.batch_commits import ClusterAge
from plait.storage.logs.log import Log
from plait.storage.marks import ArchiveMark

Patch = pytest.MonkeyPatch
Defect = Callable[[Patch], None]


def delete_what_is_not_archived(patch: Patch) -> None:
    """Retention does not wait for archives."""
    everything = ArchiveMark(1 << 62, 1 << 62, retained_offset=1 << 62)
    patch.setattr(Retention, "_archived", lambda self: everything)


def leave_out_where_failed_messages_are(patch: Patch) -> None:
    """A route forgets the partition that retains a key's failed message."""
    patch.setattr(passed, "_retained_from", lambda partition: partition.next)


def interrupt_closing(patch: Patch) -> None:
    """A cancelled ``close()`` leaves the consumer attached."""

    async def naive(self: Closing[Any]) -> Any:
        return await self._close()

    patch.setattr(Closing, "__call__", naive)


def stay_attached_to_all_subjects(patch: Patch) -> None:
    """A consumer of several subjects that closes stays attached to them."""

    async def naive(self: SeveralFetcher) -> None:
        pass

    patch.setattr(SeveralFetcher, "leave", naive)


def start_a_known_group_again_on_new_partitions(patch: Patch) -> None:
    """``start="latest"`` also applies to partitions that are new to a known group."""

    async def naive(router: Any, route: Any, terms: Any, limits: Any, deadline: float) -> int:
        return int(route.version)

    patch.setattr(fetcher, "find_start_version", naive)


def end_the_app_with_a_body_that_does_not_decode(patch: Patch) -> None:
    """An unexpected error of a decoder ends the app."""
    refusal = Subscription._refusal

    def naive(self: Subscription, message: Any, error: BaseException) -> Any:
        if not isinstance(error, CodecError):
            raise error
        return refusal(self, message, error)

    patch.setattr(Subscription, "_refusal", naive)


def return_a_message_while_its_thread_runs(patch: Patch) -> None:
    """A message whose ``def`` handler timed out is returned while the thread still runs."""
    patch.setattr(Subscription, "_one_at_a_time", property(lambda self: False))


def overtake_sends_that_wait_for_room(patch: Patch) -> None:
    """A send gets free space of the buffer before sends that have waited longer."""

    async def naive(self: Producer) -> None:
        while self.buffered >= self.limits.buffer_bytes:
            if self.closed is not None:
                raise self.closed
            me = object()
            future = self.waiting[me] = self.loop.create_future()
            try:
                await future
            finally:
                self.waiting.pop(me, None)

    patch.setattr(Producer, "room", naive)


def throw_rows_away_at_a_clean_stop(patch: Patch) -> None:
    """Rows that an at-most-once consumer pulled ahead are lost when it closes."""
    patch.setattr(AtMostOnceGroup, "nack", lambda *_: 0)


def forget_decisions_by_the_wall_clock(patch: Patch) -> None:
    """The age of a decision is computed from the meta server's wall clock."""
    patch.setattr(ClusterAge, "advance", lambda age, connection: age._clock.now() // 1_000_000)


def skip_rows_after_a_full_reply(patch: Patch) -> None:
    """A filtered read that found enough rows in the middle of a frame continues after the frame."""
    read = filtered_read.read_filtered

    def skipping(partition: Partition, log: Log, start: int, count: int, *rest: Any) -> ReadBatch:
        batch = read(partition, log, start, count, *rest)
        if batch.count >= count > 0:
            _, batch.end, _ = next(partition.walk(log, batch.end - 1, partition.visible))
        return batch

    patch.setattr(filtered_read, "read_filtered", skipping)


def correlate_replies_by_numbers_alone(patch: Patch) -> None:
    """The clients number their requests from 1, and the ids of requests name no client."""
    made = Requester.__init__

    def naive(requester: Requester, *arguments: Any) -> None:
        made(requester, *arguments)
        requester._channel = "request"

    patch.setattr(Requester, "__init__", naive)
