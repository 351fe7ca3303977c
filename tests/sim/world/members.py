"""Consumers of a simulated world: members of groups of every kind. They join, leave, fail and are cancelled.

A client has members of several groups of several subjects. Each member iterates, fetches batches, or is an ``App``
whose handlers are ``async def`` or ``def``, take messages or decoded bodies, raise anything and overrun their time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any, NamedTuple

import plait
from plait.errors import PlaitError
from plait.model.logical_partitions import lp_of_key
from plait.testing.history import Handling
from plait.testing.sim import Main, Process, Simulation
from tests.sim.meta_servers import ADDRESSES
from tests.sim.users import CLIENT_LIMITS, until_it_leaves
from tests.sim.world.calls import Calls, Interrupted
from tests.sim.world.ledger import Ledger, Part
from tests.sim.world.plan import GroupPlan, Plan
from tests.sim.world.senders import Body

#: How long a member stays, on average.
STAY_SECONDS = 3.0
#: For how long a cancelled call may still cause duplicates.
CANCELLED_SECONDS = 8.0
#: The longest that a handler of an app may run, where it has such a limit.
TIMEOUT_SECONDS = 0.3
#: What handlers raise besides errors of Plait's own.
ERRORS: tuple[type[BaseException], ...] = (
    ValueError, KeyError, RuntimeError, RecursionError, StopIteration, StopAsyncIteration, asyncio.CancelledError,
    TimeoutError, OSError, MemoryError, AssertionError,
)  # fmt: skip


class Fenced(Exception):
    """Another member has handled under a higher epoch."""


class Undecodable(Exception):
    """The error of a decoder."""


class Picky(Body):
    """A body whose decoder may fail."""

    def __post_init__(self) -> None:
        if _hooks:
            _hooks[-1](self.number)


#: The hook of the world that runs.
_hooks: list[Callable[[int], None]] = []


class Member(NamedTuple):
    """A consumer that is a member of a group."""

    process: Process
    consumer: plait.Consumer
    group: GroupPlan
    draw: random.Random
    calls: Calls
    #: The handlings that succeeded and those that failed since the last flush.
    done: list[Handling]
    failed: list[Handling]


class Members(Part):
    """State that all consumers share."""

    def __init__(self, simulation: Simulation, plan: Plan, ledger: Ledger) -> None:
        super().__init__(simulation, plan, ledger)
        #: True when all faults have ended. Then members stay, handlers succeed, and no call is cancelled.
        self.settled = False
        self._epochs: dict[tuple[str, str, str | int], int] = {}
        #: Keys of best-tried subjects with messages that moved to another partition.
        self.moved: set[str] = set()
        #: Messages whose decoder failed before a handler ran.
        self.undecoded: set[int] = set()
        self._calls: list[Calls] = []
        self._decoding = random.Random(f"{plan.seed} decoding")
        _hooks[:] = [self._decode]

    def settle(self) -> None:
        self.settled = True
        for calls in self._calls:
            calls.probability = 0.0

    def _decode(self, number: int) -> None:
        if not self.settled and self._decoding.random() < self.plan.failures / 2:
            self.undecoded.add(number)
            raise self._decoding.choice((Undecodable, ValueError, KeyError))(number)

    # --- clients --------------------------------------------------------------------------------

    def main(self, name: str) -> Main:
        groups = [group for group in self.plan.groups if name in group.clients]

        async def run(process: Process) -> None:
            process.blocking_threads = True
            draw = random.Random(f"{self.plan.seed} {process.name}.{process.lives}")
            # A broadcast's progress belongs to its client id.
            in_apps = [group for group in groups if group.mode != "broadcast" and draw.random() < self.plan.apps]
            apps = [self._app_of(process, group, draw) for group in in_apps]
            await asyncio.gather(
                self._client(process, [group for group in groups if group not in in_apps], draw), *apps
            )

        return run

    async def _client(self, process: Process, groups: Sequence[GroupPlan], draw: random.Random) -> None:
        if not groups:
            # A client needs at least one member.
            return
        fixed = self.plan.fixed_ids or any(group.mode == "broadcast" for group in groups)
        name = process.name if fixed else f"{process.name}.{process.lives}"
        calls = self._new_calls(draw)
        while True:
            try:
                client = self.connect(process, client_id=name)
                await calls(client.open())
                try:
                    await asyncio.gather(*(self._role(process, client, group, draw, calls) for group in groups))
                finally:
                    await client.close()
            except (PlaitError, Interrupted):
                await self.simulation.sleep(0.5)

    def _new_calls(self, draw: random.Random) -> Calls:
        calls = Calls(draw, 0.0 if self.settled else self.plan.cancels)
        self._calls.append(calls)
        return calls

    async def _role(
        self, process: Process, client: plait.Client, group: GroupPlan, draw: random.Random, calls: Calls
    ) -> None:
        """Join and leave the group again and again, in one client."""
        while True:
            await self._back(group)
            try:
                await self._member(process, client, group, draw, calls)
            except plait.Closed:
                raise
            except (PlaitError, Interrupted):
                await self.simulation.sleep(0.5)
            # The next one may open before the end of this one has reached the broker.
            await self.simulation.sleep(draw.choice((0.0, 0.001, draw.uniform(0.0, 0.5))))

    async def _back(self, group: GroupPlan) -> None:
        if group.away is not None and group.away[0] <= self.simulation.now < group.away[1] and not self.settled:
            await self.simulation.sleep(group.away[1] - self.simulation.now)

    async def _member(
        self, process: Process, client: plait.Client, group: GroupPlan, draw: random.Random, calls: Calls
    ) -> None:
        consumer = client.consumer(self._subject(group, draw), **self._options(group, draw))
        await calls(consumer.__aenter__())
        self.ledger.attached(group, process.name, self.simulation.now)
        try:
            how = self._iterate if draw.random() < 0.5 else self._fetch
            member = Member(process, consumer, group, draw, calls, [], [])
            await until_it_leaves([asyncio.create_task(how(member))], self._stay(group, draw))
        finally:
            if draw.random() < 0.3:
                # The next one opens while this one closes.
                process.spawn(consumer.close())
            else:
                try:
                    await calls(consumer.close())
                except Interrupted:
                    self._excuse(process, group)

    def _subject(self, group: GroupPlan, draw: random.Random) -> str:
        """The group's subject, or a prefix that covers no other."""
        return f"{group.subject[:-1]}*" if self.plan.prefixes and draw.random() < self.plan.prefixes else group.subject

    def _options(self, group: GroupPlan, draw: random.Random) -> dict[str, Any]:
        retry = plait.Retry(attempts=group.attempts, first=0.1, longest=0.5)
        options: dict[str, Any] = {"prefetch": self.plan.prefetch, "start": self._start(group), **group.filter}
        match group.mode:
            case "broadcast":
                return options | {"broadcast": True}
            case "once":
                return options | {"group": group.name, "delivery": "at_most_once", "fair_by": group.fair_by}
            case "ordered":
                return options | {"group": group.name, "retry": retry, "ordered": True}
            case "affinity":
                return options | {"group": group.name, "retry": retry, "affinity": "key"}
            case "shared":
                return options | {"group": group.name, "retry": retry, "fair_by": group.fair_by}

    def _start(self, group: GroupPlan) -> str:
        if group.start == "time":
            # A start time is on the client's clock. For a broker whose clock differs, it is another moment.
            agree = self.plan.skew == 0 and not any(fault.kind == "jump" for fault in self.plan.script)
            return "-1s" if agree else "latest"
        return group.start

    def _excuse(self, process: Process, group: GroupPlan) -> None:
        """Record that a cancelled call excuses duplicates."""
        now = self.simulation.now
        for name in names_of(process.name):
            self.ledger.histories[group.subject].broken("cancelled", now, until=now + CANCELLED_SECONDS, consumer=name)

    async def _stay(self, group: GroupPlan, draw: random.Random) -> None:
        stays = draw.expovariate(1.0 / STAY_SECONDS)
        if group.away is not None and self.simulation.now < group.away[0]:
            stays = min(stays, group.away[0] - self.simulation.now)
        await self.simulation.sleep(stays)
        if self.settled:
            await asyncio.get_running_loop().create_future()

    # --- consumers ------------------------------------------------------------------------------

    async def _iterate(self, member: Member) -> None:
        async for message in member.consumer:
            if member.group.mode == "once":
                self._take(member, [message])
                continue
            await self._handle(member, message)
            if member.draw.random() < 0.3:
                await self._flush(member)

    async def _fetch(self, member: Member) -> None:
        group, draw = member.group, member.draw
        while True:
            try:
                fetching = member.consumer.fetch(draw.choice((1, 5, 50)), wait=draw.choice((0.0, 0.5, 2.0)))
                batch = await member.calls(fetching)
            except Interrupted:
                # Another fetch received the messages.
                continue
            if not batch:
                await self.simulation.sleep(0.01)
            if group.mode == "once":
                self._take(member, batch)
                continue
            held: set[str | None] = set()
            for message in batch:
                if message.key is not None and message.key in held:
                    # It is delivered again, after the one that failed.
                    continue
                succeeded = await self._handle(member, message)
                if not succeeded and group.mode == "ordered" and self.plan.subject(group.subject).order == "strict":
                    held.add(message.key)
            await self._flush(member)

    def _take(self, member: Member, messages: Iterable[plait.Message]) -> None:
        """At most once: record every received message as handled, since no other member receives it."""
        for message in messages:
            handling = self._begin(member.process.name, member.group, message)
            handling.done(self.simulation.now)
            self.ledger.handled(member.group, handling, self.simulation.now)

    async def _flush(self, member: Member) -> None:
        group = member.group
        try:
            await member.calls(member.consumer.flush())
        except (PlaitError, Interrupted) as error:
            for handling in member.done:
                handling.ack_unknown(self.simulation.now)
            if isinstance(error, PlaitError):
                raise
        else:
            for handling in member.done:
                handling.ack_ok(self.simulation.now)
            self.ledger.failed.update((group.subject, group.name, int(handling.value)) for handling in member.failed)
        finally:
            member.done.clear()
            member.failed.clear()

    async def _handle(self, member: Member, message: plait.Message) -> bool:
        try:
            handling = self._begin(member.process.name, member.group, message)
        except Fenced:
            message.nack(delay=0)
            return False
        work = asyncio.ensure_future(self._work(member.group, handling, member.draw))
        try:
            succeeded = await asyncio.shield(work)
        except asyncio.CancelledError:
            # A member that leaves finishes its current message.
            self._settle(message, await work, member.draw)
            raise
        self._settle(message, succeeded, member.draw)
        (member.done if succeeded else member.failed).append(handling)
        return succeeded

    def _settle(self, message: plait.Message, succeeded: bool, draw: random.Random) -> None:
        if succeeded:
            message.ack()
        else:
            message.nack(delay=draw.choice((None, draw.uniform(0.0, 0.5))))

    async def _work(self, group: GroupPlan, handling: Handling, draw: random.Random) -> bool:
        """Do the handler's work; returns whether it succeeded."""
        if draw.random() < 0.4:
            await self.simulation.sleep(draw.uniform(0.0, 0.3))
        return self._end(group, handling, draw)

    def _end(self, group: GroupPlan, handling: Handling, draw: random.Random) -> bool:
        fails = not self.settled and group.mode not in ("once", "broadcast") and draw.random() < self.plan.failures
        if fails:
            handling.failed(self.simulation.now)
            return False
        handling.done(self.simulation.now)
        self.ledger.handled(group, handling, self.simulation.now)
        return True

    def _begin(self, consumer: str, group: GroupPlan, message: plait.Message) -> Handling:
        key, lp, epoch = message.key, None, None
        if group.mode == "ordered":
            epoch = message.epoch
            lock = int(message._delivered.lps[message._row])
            if key is None:
                self._fence((group.subject, str(message.partition), lock), epoch)
            else:
                lp = lp_of_key(key)
                if self.plan.subject(group.subject).order == "strict" or lock == lp:
                    self._fence((group.subject, group.name, key), epoch)
                else:
                    self.moved.add(key)
        # An app's members are attached at the latest now.
        self.ledger.attached(group, consumer, self.simulation.now)
        return self.ledger.histories[group.subject].handle(
            consumer,
            key,
            number_of(message.body),
            message.attempt,
            epoch,
            lp,
            (str(message.partition), message.sequence),
            self.simulation.now,
            group=group.name,
        )

    def _fence(self, what: tuple[str, str, str | int], epoch: int) -> None:
        """Refuse an epoch below the highest one seen, as a user's database does."""
        highest = self._epochs.get(what, 0)
        if epoch < highest:
            raise Fenced
        self._epochs[what] = epoch

    # --- apps -----------------------------------------------------------------------------------

    async def _app_of(self, process: Process, group: GroupPlan, draw: random.Random) -> None:
        """Run an app for the group again and again."""
        ends = random.Random(f"{self.plan.seed} {process.name}.{process.lives} {group.name} ends")
        while True:
            await self._back(group)
            app = self._app(process, group, draw)
            running = asyncio.ensure_future(app.run())
            cancelled = ends.random() < self.plan.cancels
            stop = asyncio.ensure_future(self._stay(group, draw))
            stop.add_done_callback(running.cancel if cancelled else lambda _, app=app: app.stop())
            try:
                await asyncio.wait([running])
                if cancelled:
                    self._excuse(process, group)
                if not running.cancelled():
                    running.result()
            except PlaitError:
                await self.simulation.sleep(0.5)
            finally:
                stop.cancel()
                running.cancel()
            await self.simulation.sleep(draw.uniform(0.0, 0.5))

    def _app(self, process: Process, group: GroupPlan, draw: random.Random) -> plait.App:
        name = names_of(process.name)[1]
        # Two clients must not have the same id at a time.
        app_id = f"{name}.{group.subject}.{group.name}"
        if not self.plan.fixed_ids:
            app_id += f".{draw.getrandbits(30)}"
        app = process.app(ADDRESSES, group=group.name, client_id=app_id, limits=CLIENT_LIMITS)

        options = self._options(group, draw) | {"concurrency": draw.choice((1, 3))}
        kind = draw.choice((self._async_handler, self._typed_handler, self._blocking_handler))
        overruns = 0.6 if kind == self._blocking_handler and group.mode == "ordered" else 0.3
        if draw.random() < overruns and group.mode != "once":
            options["timeout"] = TIMEOUT_SECONDS
        handler = kind(process, name, group, draw, options.get("timeout", inf))
        if kind == self._blocking_handler and group.mode != "ordered" and "timeout" in options:
            # The thread cannot be stopped: an unordered group delivers the message again while it still runs.
            for history in self.ledger.histories.values():
                history.broken("time-outs", self.simulation.now, until=inf, consumer=name)
        app.subscriber(self._subject(group, draw), **options)(handler)
        return app

    def _async_handler(self, process: Process, name: str, group: GroupPlan, draw: random.Random, timeout: float) -> Any:
        async def handle(message: plait.Message) -> None:
            await self._in_app(name, group, message, draw)

        return handle

    def _typed_handler(self, process: Process, name: str, group: GroupPlan, draw: random.Random, timeout: float) -> Any:
        async def handle(body: Picky, message: plait.Message) -> None:
            assert body.number == number_of(message.body)
            await self._in_app(name, group, message, draw)

        return handle

    def _blocking_handler(
        self, process: Process, name: str, group: GroupPlan, draw: random.Random, timeout: float
    ) -> Any:
        def handle(body: Picky, message: plait.Message) -> None:
            handling = self._begin_in_app(name, group, message)
            begun = self.simulation.now
            if draw.random() < 0.5:
                seconds = draw.uniform(0.0, 3 * TIMEOUT_SECONDS)
                # Close to the time-out only the app knows whether the handler returned in time.
                process.block(3 * timeout if 0.9 * timeout < seconds < 1.1 * timeout else seconds)
            if self.simulation.now - begun > timeout:
                # Past the time-out it has failed, whatever it returns.
                handling.failed(self.simulation.now)
            elif not self._end(group, handling, draw):
                raise draw.choice(ERRORS)("a handler fails")

        return handle

    def _begin_in_app(self, name: str, group: GroupPlan, message: plait.Message) -> Handling:
        try:
            return self._begin(name, group, message)
        except Fenced:
            raise plait.RetryLater(0.1) from None

    async def _in_app(self, name: str, group: GroupPlan, message: plait.Message, draw: random.Random) -> None:
        handling = self._begin_in_app(name, group, message)
        try:
            succeeded = await self._work(group, handling, draw)
        except asyncio.CancelledError:
            # The handler timed out: the message is retried.
            handling.failed(self.simulation.now)
            raise
        if not succeeded:
            error = draw.choice((None, *ERRORS))
            raise plait.RetryLater(draw.uniform(0.0, 0.5)) if error is None else error("a handler fails")


def names_of(process: str) -> tuple[str, str]:
    """The consumer names of a client's process: those of its consumers and of its apps."""
    return process, f"{process}.app"


def number_of(body: bytes) -> int:
    return int(body[len(b'{"number":') : body.index(b",")])
