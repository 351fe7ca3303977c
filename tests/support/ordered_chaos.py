"""Injects faults into a cluster of real processes, and checks that ordered delivery keeps its promises.

The cluster has two meta servers with a private PostgreSQL, three brokers, ordered consumers and producers. Each of them
is a process. The faults, which follow from a seed:

- producers, consumers, brokers and meta servers are killed;
- consumers are stopped for longer than their lease, join and leave;
- the database goes down;
- the number of partitions changes again and again.

At the end all faults end, the cluster drains, and the histories that the processes have written are checked. The timing
of the processes does not follow from the seed.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import plait
from plait.errors import MetaUnavailable, PlaitError
from plait.testing.checker import check
from plait.testing.history import History
from tests.support.ordered_handler import GROUP
from tests.support.ordered_sender import LIMITS, SUBJECT
from tests.support.postgres import Postgres
from tests.support.program import Program
from tests.support.sink import Sink

Kind = Literal[
    "kill producer",
    "kill consumer",
    "pause consumer",
    "leave",
    "join",
    "kill broker",
    "kill meta",
    "stop database",
    "expand",
]
KINDS = ("iterate", "fetch", "app")
BROKERS = ("g1", "g2", "g3")
METAS = ("meta-1", "meta-2")
PRODUCERS = ("producer-1", "producer-2")
CONSUMERS = 6
RATE = 150.0

LEASE_SECONDS = 2.0
LEASE = ("--lease", f"{LEASE_SECONDS:g}s")
#: The number of partitions changes to each of these in turn, again and again.
EXPANSIONS = (4, 7, 3)
#: How long the effects of a fault outlast it.
AFTERMATH_SECONDS = 3 * LEASE_SECONDS
#: The test fails if a step makes no progress for this long. It allows for a machine under load.
DRAIN_SECONDS = 60.0
LOOK_SECONDS = 0.05
#: Time for consumers to log what they wait for.
REPORT_SECONDS = 2.0


class Fault(NamedTuple):
    """A kind of fault, its time (seconds from the start), its duration, and the number of its victim."""

    at: float
    kind: Kind
    seconds: float
    which: int


#: Kind of fault → how often it occurs in 15 seconds, and its shortest and longest duration.
FAULTS: dict[Kind, tuple[int, float, float]] = {
    "kill producer": (1, 0.0, 1.0),
    "kill consumer": (2, 0.0, LEASE_SECONDS),
    "pause consumer": (2, 1.2 * LEASE_SECONDS, 3.0 * LEASE_SECONDS),
    "leave": (1, 0.0, 2.0),
    "join": (1, 2.0, 6.0),
    "kill broker": (2, 0.0, 2.0),
    "kill meta": (1, 0.0, 3.0),
    "stop database": (1, 0.5, 3.0),
    "expand": (3, 0.0, 0.0),
}
ROUND_SECONDS = 15.0


def script(seed: int, seconds: float) -> list[Fault]:
    """Faults of every kind within ``seconds``. The seed determines their order and times."""
    draw = random.Random(seed)
    rounds = max(round(seconds / ROUND_SECONDS), 1)
    return sorted(
        Fault(draw.uniform(0.0, seconds), kind, draw.uniform(low, high), draw.randrange(1 << 16))
        for kind, (count, low, high) in FAULTS.items()
        for _ in range(rounds * count)
    )


class Chaos:
    """``run`` runs the cluster and the faults. The processes write logs and histories to ``directory``."""

    def __init__(self, directory: Path, seed: int, *, seconds: float, faults: Sequence[Fault] | None = None) -> None:
        self.seed = seed
        self.seconds = seconds
        self.faults = script(seed, seconds) if faults is None else faults
        self.sink = Sink(directory / "sink")
        self._directory = directory
        self._histories: list[Path] = []
        self._own = History()
        self._expansions = 0
        self._joined = 0
        #: Consumers that joined for some time.
        self._guests: list[Program] = []
        self._database = asyncio.Lock()
        self._url = ""
        self._metas = [self._program(name, "plait.cli", self._meta) for name in METAS]
        self._brokers = [self._program(name, "plait.cli", self._broker) for name in BROKERS]
        self._producers = [self._program(name, "tests.support.ordered_sender", self._producer) for name in PRODUCERS]
        self._consumers = [self._new_consumer(number) for number in range(CONSUMERS)]

    # --- the processes --------------------------------------------------------------------------

    def _program(self, name: str, module: str, arguments: Callable[[str, int], list[str]]) -> Program:
        return Program(name, self._directory, module, lambda life: arguments(name, life))

    def _new_consumer(self, number: int) -> Program:
        def arguments(name: str, life: int) -> list[str]:
            path = self._history(name, life)
            return [self.addresses, name, path, str(self.sink.path), str(self.seed), KINDS[number % len(KINDS)]]

        return self._program(f"consumer-{number}", "tests.support.ordered_handler", arguments)

    def _history(self, name: str, life: int) -> str:
        path = self._directory / f"{name}.{life}.jsonl"
        self._histories.append(path)
        return str(path)

    def _meta(self, name: str, life: int) -> list[str]:
        return ["meta", "--database", self._url, "--port", self._port(self._metas, name), *LEASE]

    def _broker(self, name: str, life: int) -> list[str]:
        data, port = str(self._directory / name), self._port(self._brokers, name)
        options = ["--flush", "async" if life % 2 else "sync", "--segment-size", "17MiB", *LEASE]
        return ["broker", "--group", name, "--meta", self.addresses, "--data", data, "--port", port, *options]

    def _producer(self, name: str, life: int) -> list[str]:
        # Each start has its own producer name: the outcomes of the previous start's last messages may be unknown.
        return [self.addresses, f"{name}.{life}", self._history(name, life), str(self.seed), str(RATE)]

    @staticmethod
    def _port(programs: list[Program], name: str) -> str:
        """The port of the program's previous start; 0 (any free port) at the first start."""
        output = next(program.output for program in programs if program.name == name)
        return output[0].rpartition(":")[2] if output else "0"

    @property
    def addresses(self) -> str:
        """The addresses of the meta servers."""
        return ",".join(meta.output[0] for meta in self._metas)

    @property
    def _programs(self) -> list[Program]:
        return [*self._metas, *self._brokers, *self._producers, *self._consumers, *self._guests]

    # --- the run --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the cluster and the faults. Raises if a promise is broken; the error names the directory of the logs."""
        postgres = await asyncio.to_thread(Postgres)
        try:
            async with self.sink:
                await self._run(postgres)
        except BaseException as error:
            error.add_note(f"seed {self.seed}; everything that was left behind is in {self._directory}")
            raise
        finally:
            for program in self._programs:
                program.kill()
            # Do not do this in a thread, so that an interrupt does not prevent it.
            postgres.remove()

    async def _run(self, postgres: Postgres) -> None:
        self._url = await asyncio.to_thread(postgres.create)
        for meta in self._metas:
            await meta.start()
        await asyncio.gather(*(broker.start() for broker in self._brokers))
        await self._create()
        await asyncio.gather(*(program.start() for program in (*self._producers, *self._consumers)))
        begun = time.monotonic()
        under_way = []
        for fault in self.faults:
            await asyncio.sleep(begun + fault.at - time.monotonic())
            under_way.append(asyncio.ensure_future(self._befall(fault, postgres)))
        await asyncio.gather(*under_way)
        await asyncio.sleep(begun + self.seconds - time.monotonic())
        await self._stop(self._producers)
        await self._drain()
        await self._stop(self._consumers)
        self._check()
        await self._stop([*self._brokers, *self._metas])

    async def _create(self) -> None:
        async with plait.connect(self.addresses, limits=LIMITS) as client:
            async with asyncio.timeout(DRAIN_SECONDS):
                while len(await client.admin.brokers()) < len(BROKERS):  # noqa: ASYNC110 - there is no event to await
                    await asyncio.sleep(LOOK_SECONDS)
            await client.admin.create_subject(SUBJECT, order="strict", partitions=2)

    async def _stop(self, programs: Sequence[Program]) -> None:
        for program in programs:
            assert program.code is None, f"{program.name} ended by itself with {program.code}:\n{program.log[-4000:]}"
        codes = await asyncio.gather(*(program.end() for program in programs))
        for program, code in zip(programs, codes, strict=True):
            assert code == 0, f"{program.name} ended with {code}:\n{program.log[-4000:]}"

    # --- faults ---------------------------------------------------------------------------------

    async def _befall(self, fault: Fault, postgres: Postgres) -> None:
        begun = time.monotonic()
        match fault.kind:
            case "stop database":
                async with self._database:
                    await asyncio.to_thread(postgres.stop)
                    await asyncio.sleep(fault.seconds)
                    await asyncio.to_thread(postgres.start)
            case "expand":
                await self._expand()
            case "join":
                await self._join(fault.seconds)
            case _:
                await self._strike(fault)
        self._own.broken(fault.kind, begun, until=time.monotonic() + AFTERMATH_SECONDS)

    async def _strike(self, fault: Fault) -> None:
        """Kill or stop one program, and start it again."""
        others = {"kill broker": self._brokers, "kill meta": self._metas, "kill producer": self._producers}
        programs = others.get(fault.kind, self._consumers)
        program = programs[fault.which % len(programs)]
        async with program.lock:
            begun = time.monotonic()
            if fault.kind == "pause consumer":
                program.send(signal.SIGSTOP)
                await asyncio.sleep(fault.seconds)
                program.send(signal.SIGCONT)
                until = time.monotonic() + AFTERMATH_SECONDS
                self._own.broken(fault.kind, begun, until=until, consumer=program.name)
                return
            code = await program.end(signal.SIGTERM if fault.kind == "leave" else signal.SIGKILL)
            assert fault.kind != "leave" or code == 0, f"{program.name} left with {code}:\n{program.log[-4000:]}"
            await asyncio.sleep(fault.seconds)
            # A meta server without a database ends; start it again, as a supervisor does.
            await program.start(again=MetaUnavailable.exit_code)

    async def _join(self, seconds: float) -> None:
        """Run another consumer for some time."""
        self._joined += 1
        consumer = self._new_consumer(CONSUMERS + self._joined)
        self._guests.append(consumer)
        await consumer.start()
        await asyncio.sleep(seconds)
        await self._stop([consumer])

    async def _expand(self) -> None:
        """Change to the next number of partitions; retries until a meta server accepts."""
        partitions = EXPANSIONS[self._expansions % len(EXPANSIONS)]
        self._expansions += 1
        while True:
            try:
                async with plait.connect(self.addresses, limits=LIMITS) as client:
                    await client.admin.expand_subject(SUBJECT, partitions)
                return
            except PlaitError:
                await asyncio.sleep(LOOK_SECONDS)

    # --- the end --------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Wait until the sink has every message whose send succeeded."""
        sends = History.read(path for path in self._histories if path.name.startswith("producer")).sends
        sent = {_value(str(send.value)) for send in sends if send.outcome == "ok"}
        assert sent, "nothing was sent"
        deadline, before = time.monotonic() + DRAIN_SECONDS, len(sent)
        while left := sent - self.sink.written:
            for consumer in self._consumers:
                assert consumer.code is None, f"{consumer.name} ended with {consumer.code}:\n{consumer.log[-4000:]}"
            if len(left) < before:
                # Extend the deadline after progress, because a busy machine is slow.
                deadline, before = time.monotonic() + DRAIN_SECONDS, len(left)
            if time.monotonic() > deadline:
                for consumer in self._consumers:
                    # The consumer logs its state.
                    consumer.send(signal.SIGUSR1)
                keys = {str(send.value): send.key for send in sends}
                stuck = Counter(keys[f"{producer}:{number}"] for producer, number in left)
                await asyncio.sleep(REPORT_SECONDS)
                raise AssertionError(f"{len(left)} messages are not handled: {stuck}\n{await self._state()}")
            await asyncio.sleep(LOOK_SECONDS)

    async def _state(self) -> str:
        """The route, the group and the allocation, as text."""
        async with plait.connect(self.addresses, limits=LIMITS) as client:
            route = await client.admin.route(SUBJECT)
            group = await client.admin.group(SUBJECT, GROUP)
            return f"{route}\n{group}\n{await client.admin.allocation(SUBJECT, GROUP)}"

    def _check(self) -> None:
        """Check the sink and the histories."""
        history = History.read(self._histories)
        history.faults += self._own.faults
        found = [*map(str, check(history, groups=[GROUP], moves=True)), *self.sink.violations]
        assert not found, f"{len(found)} violations:\n" + "\n".join(found[:20])
        for program in self._programs:
            assert "Traceback" not in program.log, f"{program.name} logged an unexpected error:\n{program.log[-4000:]}"


def _value(text: str) -> tuple[str, int]:
    producer, _, number = text.rpartition(":")
    return producer, int(number)
