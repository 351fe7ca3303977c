"""Rows have come: requests that wait for them are served.

This is on the way of every send. So what fails here costs one group or one reader, never the turn of all others.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.broker.broker import Broker
    from plait.broker.groups.shared_group import Group
    from plait.broker.partitions.partition import Partition

log = logging.getLogger("plait.broker")


class WaiterWaking:
    """Serves the waiting requests of a broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def wake(self, partition: Partition) -> None:
        """A partition has new rows."""
        for group in list(partition.waiting):
            self.wake_group(group)
        for waiter in list(partition.readers):
            try:
                batch = partition.read(
                    self._broker.message_log, waiter.sequence, partition.visible, waiter.count, waiter.size
                )
                if batch.count and waiter.leave():
                    waiter.reply(batch)
            except Exception:
                log.exception("a reader of %s cannot be served", partition.row.name)
                waiter.time_out()

    def wake_group(self, group: Group) -> None:
        """There may be rows for a group."""
        if group.waiters:
            broker = self._broker
            try:
                group.serve(
                    broker.message_log, broker, lambda waiter, delivery: broker.deliver(group, delivery, waiter.reply)
                )
            except Exception:  # noqa: BLE001 (it is logged there)
                self.failed(group)
        if not group.waiters:
            group.partition.waiting.pop(group, None)

    def failed(self, group: Group) -> None:
        """Work for a group raised an error, and is left undone. Call it where that is handled.

        Its waiting pulls end. Their clients pull again, and that request is answered with the error.
        """
        log.exception("group %s of %s cannot be served", group.name, group.partition.row.name)
        for waiter in list(group.waiters):
            waiter.time_out()
