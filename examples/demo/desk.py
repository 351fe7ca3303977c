"""Where ordered consumers write to: it checks the order of every order's events, and the epochs of those who write."""

from __future__ import annotations

import msgspec

from examples.demo.orders import STEPS
from plait.model.logical_partitions import lp_of_key


class OrderedResult(msgspec.Struct, frozen=True):
    """How the ordered consumers came out."""

    orders: int
    events: int
    #: How often the orders of a logical partition went to another consumer.
    handovers: int
    #: Events that were written again after somebody was killed or stopped.
    twice: int
    #: Events of consumers that were too late: somebody with a higher epoch had been there.
    refused: int
    violations: int
    lost: int

    @property
    def right(self) -> bool:
        return self.violations == 0 and self.lost == 0


class Desk:
    """The books of one ordered group."""

    def __init__(self, orders: int) -> None:
        self.expected = orders * len(STEPS)
        self.handled = 0
        #: Order → how many of its steps are done.
        self._done: dict[str, int] = {}
        #: Logical partition → the highest epoch that was seen, and whose it was.
        self._epochs: dict[int, tuple[int, str]] = {}
        self._handovers = self._twice = self._refused = self._violations = 0

    @property
    def complete(self) -> bool:
        """All events of all orders are done."""
        return self.handled == self.expected

    def take(self, consumer: str, order: str, step: str, epoch: int) -> bool:
        """A consumer has handled an event under an epoch; whether that counts."""
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
