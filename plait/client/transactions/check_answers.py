"""Answers the checks of brokers: calls the user's function for transactions whose producer did not decide them.

For each producer group a long poll waits at each broker. The brokers of a cluster are looked up again every
``route_seconds``.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Literal

from plait import chance, tasks
from plait.client.net.node import Node
from plait.client.net.router import Router
from plait.client.transactions.transaction_info import TransactionInfo, info_of
from plait.errors import InvalidArgument, PlaitError, TransactionDecided, TransactionNotFound
from plait.limits import ClientLimits
from plait.model.transaction_row import TransactionRow
from plait.wire import messages as m
from plait.wire.admin.transactions import DECIDE_TRANSACTION

log = logging.getLogger("plait.client")

Outcome = Literal["commit", "rollback", "unknown"]
#: Finds out whether a transaction is to be committed. A function that is not a coroutine runs in a thread.
Check = Callable[[TransactionInfo], Outcome | Awaitable[Outcome]]

_OUTCOMES: Final = ("commit", "rollback", "unknown")


class CheckAnswers:
    """The checks that one client answers."""

    def __init__(self, router: Router, limits: ClientLimits) -> None:
        self._router = router
        self._limits = limits
        self._checks: dict[str, Check] = {}
        #: (producer group, broker's node) → the task that polls.
        self._polls: dict[tuple[str, Node], asyncio.Task[None]] = {}
        self._finder: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()

    def add(self, producer_group: str, check: Check) -> None:
        """Answer the checks of a producer group with this function from now on."""
        if not callable(check):
            raise InvalidArgument(f"check {check!r} is a {type(check).__name__}; use a function")
        known = producer_group in self._checks
        self._checks[producer_group] = check
        self._wanted.set()
        if self._finder is None:
            self._finder = tasks.keep(self._find, "plait-transaction-checks")
        elif not known:
            log.debug("answering the checks of producer group %s too", producer_group)

    async def close(self) -> None:
        """Answer no further checks. A check that runs is cancelled; a broker asks again later."""
        running = [*self._polls.values(), *([self._finder] if self._finder is not None else [])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _find(self) -> None:
        """Keep a poll at each broker."""
        while True:
            self._wanted.clear()
            pause = self._limits.route_seconds
            try:
                nodes = await self._router.all_nodes()
            except PlaitError as error:
                log.info("the brokers cannot be listed to answer checks of transactions: %s", error)
                pause = self._limits.reconnect_max_seconds
            else:
                for producer_group in self._checks:
                    for node in nodes:
                        self._start(producer_group, node)
            try:
                async with asyncio.timeout(pause * chance.uniform(0.8, 1.0)):
                    await self._wanted.wait()
            except TimeoutError:
                pass

    def _start(self, producer_group: str, node: Node) -> None:
        place = producer_group, node
        if place not in self._polls:
            self._polls[place] = tasks.keep(lambda: self._poll(producer_group, node), f"plait-checks-{producer_group}")

    async def _poll(self, producer_group: str, node: Node) -> None:
        first, longest = self._limits.send_retry_first_seconds, self._limits.send_retry_max_seconds
        pause = first
        while True:
            try:
                link = await node.ready()
                request = m.TransactionChecksRequest(producer_group, self._limits.pull_wait_seconds)
                found: m.TransactionChecksReply = await link.request(request)
            except PlaitError as error:
                if node.closed is not None:
                    return
                log.debug("no checks from broker group %s: %s", node.group, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest)
                continue
            pause = first
            await asyncio.gather(*(self._answer(node, row) for row in found.transactions))

    async def _answer(self, node: Node, row: TransactionRow) -> None:
        """Call the user's function, and decide the transaction."""
        outcome = await self._outcome(info_of(row, node.group))
        if outcome == "unknown":
            return
        try:
            await node.request(DECIDE_TRANSACTION.packet(transaction=row.id, outcome=outcome))
        except (TransactionDecided, TransactionNotFound) as error:
            log.info("%s", error)
        except PlaitError as error:
            log.warning("the outcome of a transaction is not delivered; its broker asks again: %s", error)

    async def _outcome(self, transaction: TransactionInfo) -> Outcome:
        check = self._checks[transaction.producer_group]
        try:
            async with asyncio.timeout(self._limits.check_seconds):
                if inspect.iscoroutinefunction(check):
                    outcome = await check(transaction)
                else:
                    outcome = await asyncio.to_thread(check, transaction)
                    if inspect.isawaitable(outcome):
                        outcome = await outcome
            if outcome not in _OUTCOMES:
                raise InvalidArgument(f"check returned {outcome!r}; return one of {', '.join(map(repr, _OUTCOMES))}")
        except Exception:
            log.exception("the check of transaction %s failed; its broker asks again", transaction.id)
            return "unknown"
        return outcome  # type: ignore[no-any-return]
