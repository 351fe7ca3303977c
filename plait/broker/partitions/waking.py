"""Answers suspended requests when rows come.

Every send runs this code, so an error here fails one group or one reader and never the turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from plait.broker.groups.shared_group import Delivery, Group
from plait.broker.partitions.partition import Partition
from plait.broker.turn import Turn

log = logging.getLogger("plait.broker")


class WaiterWaking:
    """Answers the suspended requests of a broker."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def wake(self, partition: Partition) -> None:
        """Answer requests that wait for rows of a partition."""
        for group in list(partition.waiting):
            self.wake_group(group)
        for waiter in list(partition.readers):
            try:
                batch = partition.read(
                    self._turn.message_log, waiter.sequence, partition.visible, waiter.count, waiter.size
                )
                if batch.count and waiter.leave():
                    waiter.reply(batch)
            except Exception:
                log.exception("cannot answer a suspended read of %s", partition.row.name)
                waiter.time_out()

    def wake_group(self, group: Group) -> None:
        """Answer a group's suspended pulls for which there are rows."""
        if group.waiters:
            turn = self._turn
            try:
                group.serve(
                    turn.message_log, turn, lambda waiter, delivery: self.deliver(group, delivery, waiter.reply)
                )
            except Exception:  # noqa: BLE001 (it is logged there)
                self.failed(group)
        if not group.waiters:
            group.partition.waiting.pop(group, None)

    def deliver(self, group: Group, delivery: Delivery, reply: Callable[[Delivery | None], None]) -> None:
        """Answer a pull, for an at-most-once group after its event is durable."""
        if group.definition.delivery == "at_most_once":
            # R12: the event is durable before the rows are sent, whatever the flush mode.
            self._turn.answer_when_durable(lambda: reply(delivery))
        else:
            reply(delivery)

    def failed(self, group: Group) -> None:
        """Log the error that work for a group raised; call it in the ``except`` clause. The work is left undone.

        The group's suspended pulls end. Their clients pull again, and get the error as the reply.
        """
        log.exception("cannot serve group %s of %s", group.name, group.partition.row.name)
        for waiter in list(group.waiters):
            waiter.time_out()
