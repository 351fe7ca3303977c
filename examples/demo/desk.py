"""The target of the ordered consumers: checks the order of each order's events, and the epochs of the writers."""

from __future__ import annotations

import msgspec

from examples.demo.orders import STEPS
from plait.model.logical_partitions import lp_of_key


class OrderedResult(msgspec.Struct, frozen=True):
    """The result of the ordered consumers."""

    orders: int
    events: int
    #: How often a logical partition got another owner.
    handovers: int
    #: Events that were written again after a consumer was killed or stopped.
    twice: int
    #: Events that were refused because a consumer with a higher epoch had written before.
    refused: int
    violations: int
    lost: int

    @property
    def right(self) -> bool:
        return self.violations == 0 and self.lost == 0


class Desk:
    """The events that one ordered group has written."""

    def __init__(self, orders: int) -> None:
        self.expected = orders * len(STEPS)
        self.handled = 0
        #: Order → number of its steps that are done.
        self._done: dict[str, int] = {}
        #: Logical partition → the highest epoch so far, and its consumer.
        self._epochs: dict[int, tuple[int, str]] = {}
        self._handovers = self._twice = self._refused = self._violations = 0

    @property
    def complete(self) -> bool:
        """True if all events of all orders are done."""
        return self.handled == self.expected

    def take(self, consumer: str, order: str, step: str, epoch: int) -> bool:
        """Record an event that a consumer handled under an epoch. Returns False if a higher epoch fences it out."""
        lp = lp_of_key(order)
        highest, owner = self._epochs.get(lp, (0, consumer))
        if epoch < highest:
            self._refused += 1
            return False
        if owner != consumer:
            self._handovers += 1
        self._epochs[lp] = (epoch, consumer)
        done, number = self._done.get(order, 0), STEPS.index(step)
        if number < done:
            self._twice += 1
        else:
            self._violations += number > done or (epoch == highest and owner != consumer)
            self._done[order] = number + 1
            self.handled += 1
        return True

    def result(self) -> OrderedResult:
        return OrderedResult(
            orders=len(self._done),
            events=self.handled,
            handovers=self._handovers,
            twice=self._twice,
            refused=self._refused,
            violations=self._violations,
            lost=self.expected - self.handled,
        )
