"""Answers suspended requests when rows come.

Every send runs this code, so an error here fails one group or one reader and never the turn.
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
    """Answers the suspended requests of a broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def wake(self, partition: Partition) -> None:
        """Answer requests that wait for rows of a partition."""
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
                log.exception("cannot answer a suspended read of %s", partition.row.name)
                waiter.time_out()

    def wake_group(self, group: Group) -> None:
        """Answer a group's suspended pulls for which there are rows."""
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
        """Log the error that work for a group raised; call it in the ``except`` clause. The work is left undone.

        The group's suspended pulls end. Their clients pull again, and get the error as the reply.
        """
        log.exception("cannot serve group %s of %s", group.name, group.partition.row.name)
        for waiter in list(group.waiters):
            waiter.time_out()
