"""The demo from the first process to the result table."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.table import Table

import plait
from examples.demo.desk import OrderedResult
from examples.demo.features import show_features
from examples.demo.ledger import GroupResult, Ledger
from examples.demo.ordered import LEASE_SECONDS, Ordered
from examples.demo.orders import HANDLED, STEPS, SUBJECT
from examples.demo.processes import Child, Children, DemoFailed
from examples.demo.screen import Screen
from plait.cli.serving.child_process import OwnNode
from plait.model.names import counted

#: Group → number of consumers. One consumer of the first group is killed.
SHARED, ALONE = "billing", "audit"
CONSUMERS = {SHARED: 3, ALONE: 1}
#: The victim is stopped when it has handled this part of its expected messages.
KILL_SHARE = 0.25
#: The demo fails after this time without progress.
PATIENCE_SECONDS = 30.0
SPARK_SECONDS = 300.0
POLL_SECONDS = 0.05
#: The order whose history is looked up in the archive.
LOOKED_UP = "order-0-0"


class Plan(msgspec.Struct, frozen=True):
    """The size of the demo."""

    producers: int
    orders: int
    seconds: float
    #: Orders whose events are consumed in order.
    ordered: int
    spark: bool

    @property
    def total(self) -> int:
        return self.producers * self.orders * len(STEPS)


async def run(plan: Plan) -> None:
    """Run the demo; raises ``DemoFailed`` if a check fails."""
    with Screen() as screen:
        async with AsyncExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plait-demo-")))
            demo = Demo(plan, screen, directory)
            demo.children = await stack.enter_async_context(Children(directory))
            stack.push_async_callback(demo.stop_readers)
            await demo.run(stack)
    demo.show()
    demo.check()


class Demo:
    """One run."""

    children: Children

    def __init__(self, plan: Plan, screen: Screen, directory: Path) -> None:
        self._plan = plan
        self._screen = screen
        self._directory = directory
        self._data = directory / "data"
        self._sent: dict[int, int] = dict.fromkeys(range(plan.producers), 0)
        self._ledgers = {group: Ledger(group, plan.producers, plan.orders) for group in CONSUMERS}
        self._consumers: dict[str, list[Child]] = {group: [] for group in CONSUMERS}
        self._readers: list[asyncio.Task[None]] = []
        self._last_progress = time.monotonic()
        #: The consumer that is killed.
        self._victim: Child | None = None
        self._returned = 0
        self._ordered: OrderedResult | None = None
        self._spark: dict[str, Any] | None = None
        self._audited: dict[str, Any] | None = None

    async def run(self, stack: AsyncExitStack) -> None:
        screen, plan = self._screen, self._plan
        spark = None
        if plan.spark:
            places = str(self._data), SUBJECT, str(self._directory / "archive")
            spark = await self.children.start("spark", "examples.demo.pipeline", *places)
            screen.event("Spark is starting")
        node = await stack.enter_async_context(
            OwnNode(
                self._data,
                "--segment-size",
                "64MiB",
                "--lease",
                f"{LEASE_SECONDS:g}s",
                log=self._directory / "node.log",
            )
        )
        screen.event(f"node ready at {node.address}")
        async with plait.connect(node.address) as client:
            await self._start(client, node.address)
            await self._kill_one(client, node.address)
            async for text in show_features(node.address, self._directory):
                screen.event(text)
            await self._until(lambda: sum(self._sent.values()) == plan.total, "the producers to finish")
            screen.event(f"producers done: {plan.total:,} sends acknowledged")
            await self._until(lambda: all(ledger.complete for ledger in self._ledgers.values()), "the groups")
            screen.line()
            await self._stop_consumers()
            await self._compare(client)
            self._ordered = await Ordered(node.address, plan.ordered, self.children, screen).run()
        code = await node.stop()
        if code != 0:
            raise DemoFailed(f"the node ended with code {code}")
        screen.event("node drained and stopped")
        if spark is not None:
            await self._ask(spark)

    # --- the parts ------------------------------------------------------------------------------

    async def _start(self, client: plait.Client, address: str) -> None:
        for group, count in CONSUMERS.items():
            for number in range(count):
                await self._consumer(address, group, number)
        # Messages that wait for late consumers would be handled before one of them can be killed.
        while {group.group: group.online for group in await client.admin.groups()} != CONSUMERS:
            self._check("the consumers to join")
            await asyncio.sleep(POLL_SECONDS)
        self._last_progress = time.monotonic()
        for number in self._sent:
            seconds = f"{self._plan.seconds:g}"
            arguments = (address, SUBJECT, str(number), str(self._plan.orders), seconds)
            child = await self.children.start(f"producer-{number}", "examples.demo.producer", *arguments)
            self._start_reader(self._read_producer(child, number))
        self._screen.event(
            f"{self._plan.producers} producers, {self._plan.orders:,} orders each; "
            + " and ".join(f"group {group!r} with {count} consumers" for group, count in CONSUMERS.items())
        )

    async def _consumer(self, address: str, group: str, number: int) -> None:
        name = f"{group}-{number}"
        child = await self.children.start(name, "examples.demo.consumer", address, group, name)
        self._consumers[group].append(child)
        self._start_reader(self._read_consumer(child, group))

    def _start_reader(self, work: Any) -> None:
        self._readers.append(asyncio.ensure_future(work))

    async def stop_readers(self) -> None:
        """Stop reading the pipes, so that ``Children`` can read the rest."""
        for task in self._readers:
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _read_producer(self, child: Child, number: int) -> None:
        async for line in child.lines():
            self._sent[number] = int(line)
            self._moved("sent", sum(self._sent.values()))
        await child.succeed()

    async def _read_consumer(self, child: Child, group: str) -> None:
        ledger = self._ledgers[group]
        async for records in child.records(HANDLED.itemsize):
            ledger.add(child.name, records)
            self._moved(group, ledger.distinct)

    def _moved(self, name: str, done: int) -> None:
        self._last_progress = time.monotonic()
        self._screen.count(name, done, self._plan.total)

    async def _kill_one(self, client: plait.Client, address: str) -> None:
        """Send SIGKILL to a consumer that holds messages: the first that has handled its part."""
        ledger = self._ledgers[SHARED]
        share = KILL_SHARE * self._plan.total / CONSUMERS[SHARED]

        def early() -> list[Child]:
            return [child for child in self._consumers[SHARED] if ledger.of(child.name) >= share]

        await self._until(lambda: bool(early()), f"a consumer of {SHARED!r} to handle its first messages")
        self._victim = victim = early()[0]
        victim.send_signal(signal.SIGSTOP)
        held = 0
        while held == 0:
            self._check(f"{victim.name} to hold messages")
            group = await client.admin.group(SUBJECT, SHARED)
            held = next((consumer.held for consumer in group.consumers if consumer.client == victim.name), 0)
            await asyncio.sleep(POLL_SECONDS)
        await victim.end(signal.SIGKILL)
        self._returned = held
        self._screen.event(
            f"killed {victim.name} (SIGKILL) with {held:,} messages in flight; another consumer replaces it"
        )
        await self._consumer(address, SHARED, CONSUMERS[SHARED])

    async def _stop_consumers(self) -> None:
        for child in (child for children in self._consumers.values() for child in children):
            code = await child.end()
            if code != 0 and child is not self._victim:
                raise DemoFailed(f"{child.name} ended with code {code}: {child.stderr_tail()}")
        await asyncio.gather(*self._readers)

    async def _compare(self, client: plait.Client) -> None:
        """Check that the node reports the same progress."""
        for group in await client.admin.groups(SUBJECT):
            if group.lag or group.lost:
                raise DemoFailed(f"the node reports lag {group.lag} and lost {group.lost} for group {group.group!r}")

    async def _ask(self, spark: Child) -> None:
        """Let Spark count, archive and audit. The lookup in the archive does not need Spark."""
        self._screen.event("Spark reads the log files")
        spark.write_line("go")
        results: dict[str, Any] = {}
        try:
            async with asyncio.timeout(SPARK_SECONDS):
                async for line in spark.lines():
                    if line.startswith("{"):
                        results |= self._show_spark(json.loads(line))
                await spark.succeed()
        except TimeoutError:
            raise DemoFailed(f"Spark took longer than {SPARK_SECONDS:g} s: {spark.stderr_tail()}") from None
        if not results.keys() >= {"counted", "archived", "audited"}:
            raise DemoFailed(f"Spark did not report all results: {spark.stderr_tail()}")
        self._spark, self._audited = results["counted"], results["audited"]

    def _show_spark(self, results: dict[str, Any]) -> dict[str, Any]:
        ((what, value),) = results.items()
        show = self._screen.event
        if what == "step":
            show(f"Spark: {value}")
        elif what == "counted":
            show(f"Spark counted {value['messages']:,} messages of {value['orders']:,} orders")
        elif what == "archived":
            show(f"archived {value['messages']:,} messages and {value['events']:,} events in {value['files']} files")
            self._look_up()
        else:
            dead = counted(value["dead"], "dead letter")
            show(
                f"audited {value['messages']:,} messages of {value['subjects']} subjects in {value['groups']} groups: "
                f"{value['acked']:,} acks, {value['redelivered']:,} redelivered, {dead}"
            )
        return results

    def _look_up(self) -> None:
        """Find the events of one order in the archive."""
        from plait.spark.history.lookup import History

        begun = time.perf_counter()
        with History(self._directory / "archive") as history:
            found = history.find(SUBJECT, key=LOOKED_UP)
        seconds = time.perf_counter() - begun
        steps = [json.loads(body)["step"] for body in found["body"].to_pylist()]
        if tuple(steps) != STEPS:
            raise DemoFailed(f"the archive has the events {steps} of {LOOKED_UP}; expected {STEPS}")
        self._screen.event(f"history of {LOOKED_UP} in {1000 * seconds:.0f} ms, without Java: {', '.join(steps)}")

    # --- waiting --------------------------------------------------------------------------------

    async def _until(self, done: Callable[[], bool], what: str) -> None:
        while not done():
            self._check(what)
            await asyncio.sleep(POLL_SECONDS)

    def _check(self, what: str) -> None:
        """Raise the error of a part that failed, or ``DemoFailed`` if nothing moves while waiting for ``what``."""
        for task in self._readers:
            if task.done():
                task.result()
        for child in (child for children in self._consumers.values() for child in children):
            if not child.running and child is not self._victim:
                raise DemoFailed(f"{child.name} ended too early: {child.stderr_tail()}")
        if time.monotonic() - self._last_progress > PATIENCE_SECONDS:
            counts = ", ".join(f"{name} {ledger.distinct:,}" for name, ledger in self._ledgers.items())
            raise DemoFailed(
                f"no progress for {PATIENCE_SECONDS:g} s while waiting for {what}: "
                f"sent {sum(self._sent.values()):,}, {counts} of {self._plan.total:,}"
            )

    # --- the end --------------------------------------------------------------------------------

    @property
    def _results(self) -> list[GroupResult]:
        return [ledger.result() for ledger in self._ledgers.values()]

    def show(self) -> None:
        """Print the result table."""
        title = "result (twice: handled again after redelivery; order kept: per producer)"
        table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
        columns = ("group", "sent", "consumed", "redelivered", "twice", "lost", "order kept")
        for column in columns:
            table.add_column(column, justify="left" if column == "group" else "right", overflow="fold")
        sent = f"{sum(self._sent.values()):,}"
        for result in self._results:
            kept = f"{'yes' if result.order_kept == result.order_checked else 'NO'}, {result.order_kept} of"
            table.add_row(
                result.group,
                sent,
                f"{result.distinct:,}",
                f"{result.redelivered:,}",
                f"{result.twice:,}",
                f"{result.lost:,}",
                f"{kept} {result.order_checked}",
            )
        if self._spark is not None:
            found = self._spark
            lost = self._plan.total - found["different"]
            kept = "yes" if found["out_of_order"] == 0 else f"NO, {found['out_of_order']:,} times"
            table.add_row("Spark", sent, f"{found['different']:,}", "", "", f"{lost:,}", kept)
        self._screen.table(table)
        self._show_ordered()
        if self._audited is not None and self._audited["held"] and self._audited["judged"]:
            self._screen.event("audit: every promise was kept")

    def _show_ordered(self) -> None:
        """Print the result of the ordered consumers. Handovers are of logical partitions; refused events were late."""
        assert self._ordered is not None
        found = self._ordered
        title = f"each order's events in order: order violations = {found.violations}"
        table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
        for column in ("orders", "events", "lost", "twice", "refused (too late)", "handovers"):
            table.add_column(column, justify="right", overflow="fold")
        figures = (found.orders, found.events, found.lost, found.twice, found.refused, found.handovers)
        table.add_row(*(f"{figure:,}" for figure in figures))
        self._screen.table(table)

    def check(self) -> None:
        """Raise ``DemoFailed`` if any result is wrong."""
        wrong = [f"group {r.group!r}: {r}" for r in self._results if not r.right]
        if self._ordered is None or not self._ordered.right or not self._ordered.handovers:
            wrong.append(f"in order: {self._ordered}")
        redelivered = sum(r.redelivered for r in self._results)
        if redelivered < self._returned:
            wrong.append(f"a killed consumer held {self._returned} messages, {redelivered} were redelivered")
        total = self._plan.total
        expected = {
            "messages": total,
            "different": total,
            "wrong_keys": 0,
            "out_of_order": 0,
            "orders": self._plan.producers * self._plan.orders,
        }
        if self._spark is not None and self._spark != expected:
            wrong.append(f"Spark found {self._spark}, expected {expected}")
        if self._audited is not None and not (self._audited["held"] and self._audited["judged"]):
            wrong.append(f"the audit found {self._audited}")
        if wrong:
            raise DemoFailed("; ".join(wrong))
