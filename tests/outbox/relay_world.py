"""A simulated outbox: three relay processes, one database, and brokers, on virtual time and with faults from a seed.

The relays are the shipped classes. The database is SQLite in memory; a transaction of a relay is one step of the
simulation, before and after which time passes while the database is slow. The brokers judge frames with the shipped
producer table, as ``broker/appender.py`` does. Applications open transactions, which get their ids at once and become
visible at their commit, in any order; two open transactions never have the same key.

At the end everything heals, the outbox must become empty, and the order in which brokers stored the messages of each
key must be the order of its commits: nothing lost, nothing twice.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from plait.client.send.numbered_sender import NumberedSender
from plait.client.types import PartitionName
from plait.errors import (
    FlowControl,
    OutOfSequence,
    PlaitError,
    ProducerConflict,
    StaleRoute,
    Unavailable,
    UnknownProducer,
)
from plait.frame.columns import Column
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS, ClientLimits
from plait.model.logical_partitions import keyed_lps
from plait.outbox import Outbox
from plait.outbox.outgoing_row import outgoing_row
from plait.outbox.relay import DatabaseRelay
from plait.storage.producers import FrameVerdict, ProducerTable
from plait.testing.sim.process import Process
from plait.testing.sim.simulation import Simulation
from plait.wire import messages as m

SUBJECTS = ("pay", "ship")
GROUPS = ("g1", "g2", "g3")
KEYS = [f"k{number}" for number in range(8)]
RELAYS = ("relay-1", "relay-2", "relay-3")
LEASE_SECONDS = 2.0
POLL_SECONDS = 0.5
#: A frame reaches its broker within this time, or never. Routes change less often, so that no frame is older than two
#: changes: see the consequences in docs/adr/0048.
LATENCY_SECONDS = 0.05
ROUTE_SECONDS = 0.5
#: All rows are sent this long after the last fault.
CALM_SECONDS = 120.0


class ModelRoute:
    """One version of a subject's route: LP ranges of random lengths."""

    def __init__(self, subject: str, version: int, chosen: random.Random) -> None:
        self.subject = subject
        self.version = version
        self.partitions = [PartitionName(subject, group) for group in GROUPS]
        cuts = sorted(chosen.randrange(LOGICAL_PARTITIONS) for _ in range(3))
        order = chosen.sample(range(len(GROUPS)), len(GROUPS))
        self.table = np.array([*order, order[0]])[np.searchsorted(cuts, np.arange(LOGICAL_PARTITIONS), "right")]

    def writable(self, group: str) -> bool:
        return True


class ModelPartition:
    """What a broker stores of a subject."""

    def __init__(self, number: int, route: ModelRoute, index: int) -> None:
        self.number = number
        self.index = index
        self.sequence = 0
        self.version = route.version
        self.accepts = route.table == index


class ModelBrokers:
    """All brokers: they store frames as ``Appender`` does."""

    def __init__(self, chosen: random.Random) -> None:
        self._chosen = chosen
        self.routes = {subject: ModelRoute(subject, 1, chosen) for subject in SUBJECTS}
        self.partitions: dict[tuple[PartitionName, bool], ModelPartition] = {}
        for route in self.routes.values():
            for index, name in enumerate(route.partitions):
                for delayed in (False, True):
                    self.partitions[name, delayed] = ModelPartition(len(self.partitions) + 1, route, index)
        self.producers = {
            group: ProducerTable(producers_max=100, window_frames=16, keep_seconds=1e9) for group in GROUPS
        }
        #: Broker groups that answer no request, and those that refuse sends.
        self.away: set[str] = set()
        self.busy: set[str] = set()
        #: (subject, key) → bodies, in the order in which they were stored.
        self.stored: dict[tuple[str, str], list[str]] = defaultdict(list)

    def seal(self, subject: str) -> ModelRoute:
        """Begin a change of the route: LPs that move are accepted by no partition."""
        new = ModelRoute(subject, self.routes[subject].version + 1, self._chosen)
        for (name, _), partition in self.partitions.items():
            if name.name == subject:
                partition.accepts = partition.accepts & (new.table == partition.index)
                partition.version = new.version
        return new

    def publish(self, route: ModelRoute) -> None:
        """End the change."""
        self.routes[route.subject] = route
        for (name, _), partition in self.partitions.items():
            if name.name == route.subject:
                partition.accepts = route.table == partition.index

    def number(self, group: str, request: m.PartitionNumberRequest) -> m.PartitionNumberReply:
        found = self.partitions[PartitionName(request.name, group), request.delayed]
        return m.PartitionNumberReply(found.number, request.name)

    def store(self, group: str, number: int, data: bytes) -> m.SendReply:
        """Store a frame once, or raise what a broker replies."""
        if group in self.busy:
            raise FlowControl("the log is busy; send again")
        (name, _), partition = next(item for item in self.partitions.items() if item[1].number == number)
        assert name.group == group
        frame = FrameView(data).verify()
        table = self.producers[group]
        first, count = frame.first, frame.count
        verdict = table.judge(frame.producer, number, first, count, frame.previous)
        window = table.window(frame.producer, number)
        if verdict is FrameVerdict.DUPLICATE:
            run = table.find(frame.producer, number, first, count)
            if run is not None and frame.crc_following(run.previous) == run.crc:
                return m.SendReply(run.base)
        if verdict is not FrameVerdict.NEW:
            if window is not None and window.overlaps(first, first + count - 1):
                raise ProducerConflict("other rows", producer="", first=first)
            if verdict is not FrameVerdict.GAP:
                raise UnknownProducer("not known")
            raise OutOfSequence("a gap", last=window.last if window else 0)
        lps = keyed_lps(frame.key_hashes())
        if not (partition.accepts[lps].all() if len(lps) else partition.accepts.any()):
            raise StaleRoute("sealed", last=window.last if window else 0, version=partition.version)
        table.stored(frame.producer, number, first, count, frame.previous, partition.sequence, 0, frame.crc)
        partition.sequence += count
        keys = frame.binary(Column.KEY).to_pylist() if frame.has(Column.KEY) else [b""] * count
        for key, body in zip(keys, frame.binary(Column.BODY).to_pylist(), strict=True):
            self.stored[name.name, key.decode()].append(body.decode())
        return m.SendReply(partition.sequence - count)


class ModelLink:
    """The connection of one relay to one broker: in order, with latency; requests and replies may be lost."""

    welcome = None

    def __init__(self, world: RelayWorld, group: str) -> None:
        self._world = world
        self._group = group
        self._arrival = 0.0

    async def ready(self, seconds: float | None = None) -> ModelLink:
        return self

    async def request(self, message: Any, parts: Any = (), size: int = 0) -> Any:
        world, loop = self._world, asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        data = b"".join(bytes(part) for part in parts)
        chosen = world.chosen
        lost = chosen.random() < world.loss

        def arrive() -> None:
            """Runs in the broker's process: also after the relay was killed."""
            if self._group in world.brokers.away or (lost and chosen.random() < 0.5):
                answer: Any = Unavailable("the connection is lost")
            else:
                try:
                    if isinstance(message, m.PartitionNumberRequest):
                        answer = world.brokers.number(self._group, message)
                    else:
                        answer = world.brokers.store(self._group, message.partition, data)
                except PlaitError as error:
                    answer = error
                if lost:
                    answer = Unavailable("the connection is lost")
            loop.call_soon_threadsafe(settle, answer)

        def settle(answer: Any) -> None:
            if not reply.done():
                if isinstance(answer, PlaitError):
                    reply.set_exception(answer)
                else:
                    reply.set_result(answer)

        broker_loop = world.broker_loop
        self._arrival = max(self._arrival, broker_loop.time() + chosen.uniform(0.0, LATENCY_SECONDS / 2))
        broker_loop.call_at(self._arrival, arrive)
        return await reply


class ModelRouter:
    """Routes as a client knows them: a cached one may be old."""

    def __init__(self, world: RelayWorld) -> None:
        self._world = world
        self._cached: dict[str, ModelRoute] = {}
        self._links = {group: ModelLink(world, group) for group in GROUPS}

    def known(self, subject: str) -> ModelRoute | None:
        if self._world.chosen.random() < 0.1:
            self._cached[subject] = self._world.brokers.routes[subject]
        return self._cached.get(subject)

    async def refresh(self, subject: str) -> ModelRoute:
        await self._world.simulation.sleep(self._world.chosen.uniform(0.0, LATENCY_SECONDS))
        self._cached[subject] = self._world.brokers.routes[subject]
        return self._cached[subject]

    async def group_node(self, group: str) -> ModelLink:
        return self._links[group]


class ModelClient:
    """What ``NumberedSender`` uses of a client."""

    def __init__(self, world: RelayWorld) -> None:
        self._router = ModelRouter(world)
        self.limits = ClientLimits(send_seconds=1.0)


class RelayWorld:
    """One run from a seed; ``run`` checks the promises."""

    def __init__(self, seed: int, steps: int = 50) -> None:
        self._steps = steps
        self.chosen = random.Random(f"{seed} outbox")
        self.simulation = Simulation(seed, allow_logs=["outbox", "plait-outbox"])
        self.brokers = ModelBrokers(random.Random(f"{seed} routes"))
        self._engine = sa.create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
        metadata = sa.MetaData()
        self._outbox = Outbox(metadata)
        metadata.create_all(self._engine)
        #: The probability that a request or its reply is lost, and that a transaction of a relay fails.
        self.loss = 0.0
        self.database_loss = 0.0
        #: How long a transaction of a relay takes at most; the answer to its commit takes a tenth of that.
        self.database_seconds = 0.0
        self._number = 0
        self._open: dict[int, list[dict[str, Any]]] = {}
        #: (subject, key) → bodies in the order of their commits.
        self._committed: dict[tuple[str, str], list[str]] = defaultdict(list)
        self._changing: dict[str, ModelRoute] = {}
        self._changed_at = dict.fromkeys(SUBJECTS, -1.0)

    # --- processes ------------------------------------------------------------------------------

    async def _relay(self, process: Process) -> None:
        client: Any = ModelClient(self)
        relay = DatabaseRelay(
            NumberedSender(client), self._engine, self._outbox._store, process.clock, LEASE_SECONDS, POLL_SECONDS
        )
        database: Any = relay._database
        transaction = database._run

        def run(work: Any) -> Any:
            fails = self.chosen.random() < self.database_loss
            if fails and self.chosen.random() < 0.5:
                raise sa.exc.OperationalError("", {}, Exception("the database is away"))
            result = transaction(work)
            if fails:
                raise sa.exc.OperationalError("", {}, Exception("the connection is lost after the commit"))
            return result

        async def run_slowly(work: Any) -> Any:
            await self.simulation.sleep(self.chosen.uniform(0.0, self.database_seconds))
            result = await transactions(work)
            await self.simulation.sleep(self.chosen.uniform(0.0, self.database_seconds / 10))
            return result

        transactions = database.run
        database._run, database.run = run, run_slowly
        await relay.run()

    async def _broker(self, process: Process) -> None:
        self.broker_loop = asyncio.get_running_loop()
        await asyncio.get_running_loop().create_future()

    # --- applications ---------------------------------------------------------------------------

    def _begin(self) -> None:
        """Open a transaction with messages of a few keys that no other open transaction has."""
        taken = {(row["subject"], row["text"]) for rows in self._open.values() for row in rows}
        rows = []
        for _ in range(self.chosen.randint(1, 4)):
            subject, key = self.chosen.choice(SUBJECTS), self.chosen.choice([*KEYS, None])
            if key is None or (subject, key) not in taken:
                self._number += 1
                delay = 1.0 if key is None and self.chosen.random() < 0.3 else None
                row = outgoing_row(subject, str(self._number), key, None, None, delay, None)
                rows.append({**row, "id": self._number, "text": key or ""})
        if rows:
            self._open[self._number] = rows

    def _commit(self) -> None:
        if self._open:
            rows = self._open.pop(self.chosen.choice(sorted(self._open)))
            columns = [{name: value for name, value in row.items() if name != "text"} for row in rows]
            with self._engine.begin() as connection:
                connection.execute(self._outbox.table.insert(), columns)
            for row in rows:
                self._committed[row["subject"], row["text"]].append(row["body"].decode())

    def _roll_back(self) -> None:
        if self._open:
            del self._open[self.chosen.choice(sorted(self._open))]

    # --- faults ---------------------------------------------------------------------------------

    def _kill(self) -> None:
        process = self.simulation.process(self.chosen.choice(RELAYS))
        if process.alive:
            process.kill()

    def _start(self) -> None:
        for name in RELAYS:
            process = self.simulation.process(name)
            if not process.alive:
                process.start()
                return

    def _pause(self) -> None:
        process = self.simulation.process(self.chosen.choice(RELAYS))
        if process.alive:
            process.pause()

    def _resume(self) -> None:
        for name in RELAYS:
            self.simulation.process(name).resume()

    def _change_route(self) -> None:
        subject = self.chosen.choice(SUBJECTS)
        now = self.simulation.now
        if now - self._changed_at[subject] < ROUTE_SECONDS:
            return
        self._changed_at[subject] = now
        if subject in self._changing:
            self.brokers.publish(self._changing.pop(subject))
        else:
            self._changing[subject] = self.brokers.seal(subject)

    def _toggle(self, groups: set[str]) -> None:
        groups ^= {self.chosen.choice(GROUPS)}

    def _lose(self) -> None:
        self.loss = self.chosen.choice([0.0, 0.1, 0.5])

    def _fail_database(self) -> None:
        self.database_loss = self.chosen.choice([0.0, 0.05, 0.3])

    def _slow_database(self) -> None:
        self.database_seconds = self.chosen.choice([0.0, 0.1, LEASE_SECONDS])

    # --- the run --------------------------------------------------------------------------------

    def _step(self) -> None:
        actions = [
            *[self._begin] * 8,
            *[self._commit] * 8,
            self._roll_back,
            *[self._kill] * 2,
            *[self._start] * 3,
            self._pause,
            *[self._resume] * 2,
            *[self._change_route] * 3,
            lambda: self._toggle(self.brokers.away),
            lambda: self._toggle(self.brokers.busy),
            self._lose,
            self._fail_database,
            self._slow_database,
        ]
        self.chosen.choice(actions)()

    async def _drive(self) -> None:
        simulation = self.simulation
        for _ in range(self._steps):
            self._step()
            await simulation.sleep(self.chosen.choice([0.0, 0.001, 0.02, 0.1, 0.5, 1.5]))
        self.brokers.away.clear()
        self.brokers.busy.clear()
        self.loss = self.database_loss = self.database_seconds = 0.0
        for route in self._changing.values():
            self.brokers.publish(route)
        while self._open:
            self._commit()
        simulation.heal()
        end = simulation.now + CALM_SECONDS
        while self._left():
            assert simulation.now < end, f"{self._left()} rows are left in the outbox"
            await simulation.sleep(0.5)

    def _left(self) -> int:
        with self._engine.connect() as connection:
            return connection.execute(sa.select(sa.func.count()).select_from(self._outbox.table)).scalar_one()

    def run(self) -> None:
        """Run, then compare what was stored with what was committed."""
        with self.simulation as simulation:
            simulation.process("brokers", self._broker).start()
            for name in RELAYS:
                simulation.process(name, self._relay).start()
            simulation.run(self._drive())
        self._engine.dispose()
        for place, bodies in self._committed.items():
            stored = self.brokers.stored[place]
            # Messages without a key have no order.
            assert (stored if place[1] else sorted(stored, key=int)) == (
                bodies if place[1] else sorted(bodies, key=int)
            ), place
        assert sum(map(len, self.brokers.stored.values())) == sum(map(len, self._committed.values()))
