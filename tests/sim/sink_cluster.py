"""Spark drivers that write batches into a simulated cluster: two meta servers, three brokers, faults from a seed.

The drivers run the code of Plait's Spark sink: stages, commits and aborts, with Plait's clients and servers. A driver
notes committed batches in memory that outlives it, as Spark does in its checkpoint. If a driver dies before it notes a
batch, the next driver writes the batch again, with other rows. Machines and the network fail, with power loss in any
flush mode, and the number of partitions changes. The wall clocks of meta servers differ, and jump by weeks or to 1970.
At the end each batch must be stored once, with the rows of a single attempt, and the rows of each key in order.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

import plait
from plait.client.send.open_rows import hash_keys
from plait.client.send.row_columns import RowColumns
from plait.client.staged.batch_commit import abort, commit
from plait.client.staged.stage_writer import Staged, StageWriter
from plait.errors import PlaitError
from plait.frame.columns import Column
from plait.frame.view import frames_in
from plait.model.logical_partitions import lp_of_key
from plait.testing.sim import Fault, Faults, Process
from tests.sim.meta_servers import ADDRESSES, LEASE_SECONDS, Outage
from tests.sim.ordered_cluster import STRICT, WEIGHTS, Change, OrderedCluster
from tests.sim.users import CLIENT_LIMITS

#: The number of tasks of a batch, and the number of rows that a task writes for each of its keys.
TASKS, TIMES = 2, 3
KEYS = 3
#: Running batches end within this time once all faults have ended.
FINISH_SECONDS = 300.0


class Row(NamedTuple):
    """The contents of a message's body."""

    query: str
    batch: int
    attempt: int
    task: int
    number: int


class SinkCluster(OrderedCluster):
    """``run`` runs one seed.

    ``pause_seconds`` is the average pause between two batches of a driver. ``forgetful`` is the share of batches that a
    driver does not note as committed.
    """

    def __init__(
        self,
        seed: int,
        *,
        seconds: float = 8.0,
        drivers: int = 2,
        script: Sequence[Fault] | None = None,
        changes: Sequence[Change] | None = None,
        outages: Sequence[Outage] | None = None,
        pause_seconds: float = 0.1,
        forgetful: float = 0.15,
    ) -> None:
        self._forgetful = forgetful
        self._pause_seconds = pause_seconds
        self._names = [f"driver-{n}" for n in range(drivers)]
        super().__init__(
            seed, seconds=seconds, producers=0, consumers=0, script=script, changes=changes, outages=outages
        )
        self.drivers = [self.simulation.process(name, self._drive) for name in self._names]
        #: The last batch that each driver noted as committed; survives the driver.
        self.noted: dict[str, int] = dict.fromkeys(self._names, -1)
        self.attempts = 0
        self.refused = 0
        self._ending = False
        self._ended: set[str] = set()

    def _faults(self) -> list[Fault]:
        metas, brokers = [each.name for each in self.metas.processes], [each.name for each in self.brokers]
        pairs = [(one, other) for one in brokers for other in (*metas, *self._names)]
        pairs += [(meta, name) for meta in metas for name in self._names]
        jumps = [
            Fault(
                "jump", self.random.uniform(0.0, self.seconds), 0.0, self.random.choice(metas), amount=86_400.0 * days
            )
            for days in self.random.choices((31, 40, -31, -20_000), k=self.random.randrange(5))
        ]
        return jumps + Faults(
            self.random,
            [*brokers, *metas, *3 * self._names],
            pairs,
            disks=brokers,
            # A commit syncs in every flush mode.
            weights=WEIGHTS | {"power_loss": 2},
            every_seconds=self.random.choice([0.7, 1.5, 3.0]),
            long_seconds=2.5 * LEASE_SECONDS,
            jump_seconds=20.0,
        ).script(self.seconds)

    def _fault(self, fault: Fault) -> None:
        """Does nothing: faults excuse nothing here."""

    def _run(self) -> list[Any]:
        sim = self.simulation
        with sim:
            self._start(self.drivers)
            sim.run_for(self.seconds)
            sim.heal()
            self._ending = True
            sim.run_until(lambda: len(self._ended) == len(self._names), seconds=FINISH_SECONDS, waiting_for="drivers")
            self._check(sim.run(self._stored(), seconds=60.0))
        return []

    # --- a driver -------------------------------------------------------------------------------

    async def _drive(self, process: Process) -> None:
        draw = random.Random(f"{self.simulation.seed} {process.name}.{process.lives}")
        name = process.name
        while name not in self._ended:
            try:
                async with process.connect(ADDRESSES, limits=CLIENT_LIMITS) as client:
                    while name not in self._ended:
                        # Committing the last batch finishes every earlier batch that was decided.
                        last = self._ending
                        await self._write_batch(client, name, self.noted[name] + 1, draw, calm=last)
                        if last:
                            self._ended.add(name)
                        await self.simulation.sleep(draw.expovariate(1.0 / self._pause_seconds))
            except PlaitError as error:
                self.simulation.log(name, f"failed: {error}")
                await self.simulation.sleep(0.5)

    async def _write_batch(
        self, client: plait.Client, query: str, batch: int, draw: random.Random, *, calm: bool
    ) -> None:
        self.attempts += 1
        attempt = self.attempts
        if not calm and draw.random() < 0.2:
            # A task that dies, or a speculative copy that is too slow.
            await self._write_task(client, Row(query, batch, attempt, 90, 0), whole=draw.random() < 0.5)
        tasks = [self._write_task(client, Row(query, batch, attempt, task, 0)) for task in range(TASKS)]
        found = [staged for stages in await asyncio.gather(*tasks) for staged in stages]
        if not calm and draw.random() < 0.15:
            await abort(client, query, batch, found)
            return
        if not await commit(client, query, batch, found):
            self.refused += 1
        if not calm and draw.random() < self._forgetful:
            # The driver dies before it notes the commit.
            return
        self.noted[query] = batch

    async def _write_task(self, client: plait.Client, row: Row, *, whole: bool = True) -> list[Staged]:
        writer = StageWriter(client, STRICT, row.query, row.batch)
        keys = [f"{row.query}-{row.task}-{n}" for n in range(KEYS)]
        for number in range(TIMES):
            body = "|".join(map(str, row._replace(number=number))).encode()
            bodies = pa.array([body] * KEYS, pa.binary())
            await writer.write(RowColumns(bodies, pa.array(keys), hash_keys(keys, KEYS)))
        return await writer.complete() if whole else []

    # --- checks ---------------------------------------------------------------------------------

    async def _stored(self) -> dict[str, list[Row]]:
        """The visible rows of each key, in order along the spans of its logical partition."""
        async with self.simulation.process("test").connect(ADDRESSES, limits=CLIENT_LIMITS) as client:
            route = await client._router.refresh(STRICT)
        stored = [self._rows_at(name.name, name.group) for name in route.partitions]
        found: dict[str, list[Row]] = defaultdict(list)
        for key in sorted({key for rows in stored for _, key, _ in rows}):
            [spans] = [spans for first, end, spans in route.histories if first <= lp_of_key(key) < end]
            starts: dict[int, int] = {}
            for where, fence in spans:
                for sequence, text, row in stored[where]:
                    if text == key and starts.get(where, 0) <= sequence and (fence is None or sequence < fence):
                        found[key].append(row)
                starts[where] = fence or 0
        count = sum(len(rows) for rows in stored)
        assert count == sum(map(len, found.values())), "rows are in partitions that are in no route"
        return found

    def _rows_at(self, name: str, group: str) -> list[tuple[int, str, Row]]:
        broker = self.servers[group].broker
        partition = broker.subjects[name]
        batch = partition.read(broker.message_log, 0, partition.visible, 1 << 30, 1 << 30)
        rows: list[tuple[int, str, Row]] = []
        for frame in frames_in(b"".join(batch.parts)):
            keys, bodies = frame.binary(Column.KEY).to_pylist(), frame.binary(Column.BODY).to_pylist()
            for at in range(frame.count):
                query, *numbers = bodies[at].decode().split("|")
                rows.append((frame.base + at, keys[at].decode(), Row(query, *map(int, numbers))))
        return rows

    def _check(self, found: dict[str, list[Row]]) -> None:
        attempts: dict[tuple[str, int], set[int]] = defaultdict(set)
        for key, rows in found.items():
            assert [(row.batch, row.number) for row in rows] == sorted((row.batch, row.number) for row in rows), (
                f"{key} is out of order: {rows}"
            )
            for row in rows:
                attempts[row.query, row.batch].add(row.attempt)
        mixed = {batch: several for batch, several in attempts.items() if len(several) > 1}
        assert not mixed, f"batches of several attempts: {mixed}"
        wanted = {(query, batch) for query, last in self.noted.items() for batch in range(last + 1)}
        assert set(attempts) == wanted, f"batches {sorted(set(attempts) ^ wanted)} are missing, or were not committed"
        for query, last in self.noted.items():
            keys = {f"{query}-{task}-{n}" for task in range(TASKS) for n in range(KEYS)}
            assert {key for key in found if key.startswith(f"{query}-")} == keys
            for key in keys:
                numbers = [(row.batch, row.number) for row in found[key]]
                assert numbers == [(batch, n) for batch in range(last + 1) for n in range(TIMES)], f"{key}: {numbers}"
