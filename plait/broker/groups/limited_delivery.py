"""Deliveries to groups that have a limit of messages or bytes a second.

While the limit is closed nothing is delivered, and the group's pulls are suspended. A timer serves them when the limit
opens, so neither the broker nor a consumer asks again and again.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.broker.groups.group import AttachedConsumer, Group
from plait.broker.groups.waking import DueHeap, wake_group
from plait.broker.partitions.partition import Delivery
from plait.broker.partitions.settings import share_of


def take_limited(group: Group, consumer: AttachedConsumer, count: int, size: int) -> Delivery | None:
    """Rows for a consumer, as ``Group.take`` gives them, while the group's limit is open: at least one then."""
    rate, journal = group.rate, group.journal
    assert rate is not None
    now = journal.clock.monotonic()
    pause = rate.pause(now)
    if not pause:
        count = count if rate.messages is None else min(count, rate.messages.room)
        size = size if rate.size is None else min(size, rate.size.room)
        delivery = group.take(consumer, count, size)
        if delivery is None or not delivery.count:
            return delivery
        rate.spend(delivery.count, delivery.size)
        if not rate.closed:
            return delivery
        # The group may have finished logical partitions that were sealed here.
        rate.share = share_of(group.partition, group)
        pause = rate.pause(now)
    else:
        delivery = None
    journal.rates.expect(group, now + pause)
    return delivery


class OpeningRates:
    """The groups whose limits are closed, by the time at which they open."""

    def __init__(self) -> None:
        #: Called when the next opening may be earlier than before.
        self.on_change: Callable[[], object] = lambda: None
        self._due = DueHeap[Group](_wakes_at)

    @property
    def next(self) -> float | None:
        """When the next limit opens, on the monotonic clock."""
        return self._due.next

    def expect(self, group: Group, due: float) -> None:
        """Serve the group's suspended pulls at ``due``."""
        rate = group.rate
        if rate is not None and not 0.0 < rate.wakes_at <= due:
            rate.wakes_at = due
            self._due.add(due, group)
            self.on_change()

    def run(self, now: float) -> None:
        """Serve the groups whose limits are open now."""
        for group in self._due.take(now):
            if group.rate is not None:
                group.rate.wakes_at = 0.0
            wake_group(group)


def _wakes_at(group: Group) -> float:
    return 0.0 if group.rate is None else group.rate.wakes_at
