"""Asks producers for the outcome of transactions that are not decided.

Every producer keeps a long poll that names its producer group. When a transaction is due for a check, the oldest poll
of its group gets it; if there is none, the transaction waits for the next poll. A check that no decision follows counts
as one of ``transaction_checks``; after the last one the transaction is parked. A check that reaches no producer does
not count, so transactions are not parked because their producers were switched off for a night. The intervals are
counted on the monotonic clock and start again after a restart, so no check comes early.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import msgspec

from plait.broker.groups.waking import DueHeap
from plait.broker.transactions.transaction_table import OPEN, StoredTransaction
from plait.broker.transactions.transactions import Transactions
from plait.broker.turn import Turn
from plait.errors import LimitExceeded
from plait.limits import CHECKS_PAGE_MAX

#: Sends transactions to a producer. Returns False if the producer is gone.
CheckReply = Callable[[list[StoredTransaction]], bool]


class CheckPoll(msgspec.Struct, eq=False):
    """A producer that waits for checks."""

    producer_group: str
    reply: CheckReply
    #: On the monotonic clock; 0: the poll was answered.
    deadline: float


class CheckBacks:
    """The transactions of a broker that are due for a check, and the producers that wait for them."""

    def __init__(self, turn: Turn, transactions: Transactions) -> None:
        self._turn = turn
        self._transactions = transactions
        self._due = DueHeap[StoredTransaction](attrgetter("check_at"))
        self._deadlines = DueHeap[CheckPoll](attrgetter("deadline"))
        #: Producer group → its transactions that wait for a producer, by id, and its producers that wait.
        self._waiting: dict[str, dict[int, StoredTransaction]] = {}
        self._polls: dict[str, dict[CheckPoll, None]] = {}
        self._count = 0
        transactions.on_stored = self.expect

    @property
    def next_deadline(self) -> float | None:
        """When ``run_timers`` has work to do, on the monotonic clock."""
        times = [time for time in (self._due.next, self._deadlines.next) if time is not None]
        return min(times, default=None)

    def recovered(self) -> None:
        """Start the intervals of all undecided transactions."""
        for transaction in self._transactions.table.live.values():
            self.expect(transaction)

    def expect(self, transaction: StoredTransaction) -> None:
        """Check a transaction when no decision follows for a while."""
        if transaction.state == OPEN:
            self._check_after(transaction, self._turn.limits.transaction_check_first_seconds)

    def _check_after(self, transaction: StoredTransaction, seconds: float) -> None:
        transaction.check_at = self._turn.clock.monotonic() + seconds
        self._due.add(transaction.check_at, transaction)

    def run_timers(self) -> None:
        """Check the transactions that are due, and answer polls whose wait is over."""
        now = self._turn.clock.monotonic()
        groups: dict[str, None] = {}
        for transaction in self._due.take(now):
            if not transaction.rows:
                # The client went away before its first message was stored.
                self._transactions.table.forget(transaction.id)
            elif transaction.checks >= self._turn.limits.transaction_checks:
                self._transactions.park(transaction)
            else:
                self._waiting.setdefault(transaction.producer_group, {})[transaction.id] = transaction
                groups[transaction.producer_group] = None
        for producer_group in groups:
            self._serve(producer_group)
        for poll in self._deadlines.take(now):
            self._leave(poll)
            poll.reply([])

    def poll(self, producer_group: str, wait: float, reply: CheckReply) -> None:
        """Wait for checks at most ``wait`` seconds; ``reply`` is called once."""
        limit = self._turn.limits.transaction_polls
        if self._count >= limit:
            raise LimitExceeded(
                f"{limit} producers wait for checks of transactions (limit `transaction_polls`); close some clients, "
                "or raise the limit",
                limit="transaction_polls",
                value=limit,
            )
        # A deadline of 0 would mean that the poll was answered.
        deadline = self._turn.clock.monotonic() + max(wait, 0.001)
        poll = CheckPoll(producer_group, reply, deadline)
        self._polls.setdefault(producer_group, {})[poll] = None
        self._count += 1
        self._deadlines.add(deadline, poll)
        if producer_group in self._waiting:
            self._serve(producer_group)

    def _serve(self, producer_group: str) -> None:
        """Send the transactions that wait to the producers that wait, the oldest poll first."""
        while (found := self._take(producer_group)) and (polls := self._polls.get(producer_group)):
            poll = next(iter(polls))
            self._leave(poll)
            if not poll.reply(found):
                # The producer is gone: another one gets them.
                continue
            for transaction in found:
                del self._waiting[producer_group][transaction.id]
                self._transactions.check(transaction)
                self._check_after(transaction, self._turn.limits.transaction_check_seconds)

    def _take(self, producer_group: str) -> list[StoredTransaction]:
        """The next transactions that wait for a producer.

        Drops those that were decided meanwhile, or got another message and are due later.
        """
        waiting, now = self._waiting.get(producer_group, {}), self._turn.clock.monotonic()
        live = self._transactions.table.live
        found: list[StoredTransaction] = []
        for number, transaction in list(waiting.items()):
            if transaction.state != OPEN or live.get(number) is not transaction or transaction.check_at > now:
                del waiting[number]
            elif len(found) < CHECKS_PAGE_MAX:
                found.append(transaction)
        if not waiting:
            self._waiting.pop(producer_group, None)
        return found

    def _leave(self, poll: CheckPoll) -> None:
        """Remove a poll that is being answered."""
        poll.deadline = 0.0
        self._count -= 1
        polls = self._polls[poll.producer_group]
        del polls[poll]
        if not polls:
            del self._polls[poll.producer_group]
