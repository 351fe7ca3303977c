"""Two meta servers, three brokers, ordered consumers and producers in a simulation, with faults from a seed.

The processes run Plait's own classes: ``MetaServer``, ``Server``, ``Client``, ``Consumer`` and ``App``. Members join
and leave, the number of partitions changes, machines and the network fail. ``OrderedCluster.run`` then ends all faults,
resumes parked keys, waits until every sent message is handled, and checks the histories.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import msgspec

import plait
from plait.broker import BrokerConfig
from plait.broker.groups.ordered.ordered_group import OrderedGroup
from plait.errors import PlaitError
from plait.limits import KIB, MIB
from plait.server import Server
from plait.testing.checker import Violation, check
from plait.testing.history import History
from plait.testing.sim import Fault, FaultKind, Faults, Process, Simulation, SimulationFailed, play
from tests.sim.meta_servers import ADDRESSES, LEASE_SECONDS, LIMITS, MetaServers, Outage
from tests.sim.ordered_changes import PARTITIONS, Change, changes_of, round_trips
from tests.sim.ordered_members import GROUP, LOOSE, STRICT, Members
from tests.sim.ordered_senders import DelayedSends, Senders
from tests.sim.users import (
    CLIENT_LIMITS,
    DRAIN_SECONDS,
    QUIET_SECONDS,
    SHOW_SECONDS,
    empty,
    excuse,
    without_collections,
)

BROKERS = {"g1": 7451, "g2": 7452, "g3": 7453}

CONFIG = BrokerConfig(
    copy_partitions=1,
    message_segment_size=32 * KIB,
    action_segment_size=32 * KIB,
    retained_segment_size=16 * KIB,
    checkpoint_seconds=4.0,
    disk_used_max=1.0,
    disk_free_min=1 * MIB,
    limits=LIMITS,
)
WEIGHTS: dict[FaultKind, float] = {"kill": 3, "crash_at": 2, "pause": 3, "cut": 3, "cut_one_way": 1, "jump": 1}
#: Share of the runs that end with an emptied broker group, which one, and the groups that accept its messages instead.
EMPTIED_SHARE, EMPTIED, OTHERS = 0.12, "g3", ("g1", "g2")
#: How long producers send without it.
SEND_SECONDS = 2.0
#: Share of the runs that have round trips.
ROUND_TRIPS = 0.25
LOOK_SECONDS = 0.5


class OrderedCluster:
    """``run`` runs one seed.

    - ``script``, ``changes``, ``outages``: replace the seed's faults, changes of the partition count and outages of the
      database.
    - ``slow``: handling a message takes about this long. Producers send faster, so that every consumer has a backlog.
    - ``affinity``: the groups have affinity, and order is not checked.
    - ``early``: fail at the first violation instead of at the end.
    """

    def __init__(
        self,
        seed: int,
        *,
        seconds: float = 8.0,
        producers: int = 2,
        consumers: int = 8,
        script: Sequence[Fault] | None = None,
        changes: Sequence[Change] | None = None,
        outages: Sequence[Outage] | None = None,
        flush: str | None = None,
        drain_seconds: float = DRAIN_SECONDS,
        quiet_seconds: float = QUIET_SECONDS,
        slow: float = 0.0,
        affinity: bool = False,
        early: bool = False,
    ) -> None:
        self.simulation = sim = Simulation(seed)
        self.seconds = seconds
        self._drain_seconds = drain_seconds
        self._quiet_seconds = quiet_seconds
        self._early = early
        self.random = draw = random.Random(f"{seed} cluster")
        self._flush = flush or draw.choice(["async", "sync"])
        self.histories = {STRICT: History(), LOOSE: History()}
        self.metas = MetaServers(sim)
        self.brokers = [sim.process(name, self._serve) for name in BROKERS]
        #: Broker → its server since its last start.
        self.servers: dict[str, Server] = {}
        # A run with a given script has no other faults.
        self._delayed = DelayedSends(seed, share=None if script is None else 0.0)
        self.senders = Senders(sim, self.histories, self._delayed, many=slow > 0)
        self._affinity = affinity
        self.members = Members(
            sim,
            self.histories,
            on_begin=self._has_the_lock,
            on_done=self.senders.handled,
            slow=slow,
            affinity=affinity,
        )
        self.producers = [sim.process(f"producer-{n}", self.senders.run) for n in range(producers)]
        self.consumers = [
            sim.process(f"consumer-{n}", self.members.main(n, [STRICT, LOOSE] if n < 3 else [STRICT]))
            for n in range(consumers)
        ]
        self.script = self._faults() if script is None else script
        self.changes = changes_of(draw, seconds, [STRICT, STRICT, LOOSE]) if changes is None else changes
        self._emptied = script is None and random.Random(f"{seed} emptied").random() < EMPTIED_SHARE
        self.script = [*self.script, *self._delayed.faults(seconds, list(BROKERS))]
        if script is None and changes is None:
            self._add_round_trips()
        if outages is None:
            # A run with a given script has no other faults.
            outages = self._outages() if script is None else []
        self.outages = outages

    def _faults(self) -> list[Fault]:
        metas, brokers = [each.name for each in self.metas.processes], [each.name for each in self.brokers]
        consumers, producers = [each.name for each in self.consumers], [each.name for each in self.producers]
        pairs = [(one, other) for one in brokers for other in (*metas, *consumers, *producers)]
        pairs += [(meta, other) for meta in metas for other in (*consumers, *producers)]
        return Faults(
            self.random,
            # Servers are hit as often as all other processes together.
            [*2 * brokers, *metas, *consumers, *producers],
            pairs,
            disks=brokers,
            weights=WEIGHTS if self._flush == "async" else WEIGHTS | {"power_loss": 1},
            every_seconds=self.random.choice([0.7, 1.5, 3.0]),
            long_seconds=2.5 * LEASE_SECONDS,
            jump_seconds=20.0,
        ).script(self.seconds)

    def _add_round_trips(self) -> None:
        draw = random.Random(f"{self.simulation.seed} ways back")
        if draw.random() < ROUND_TRIPS:
            consumers, metas = [each.name for each in self.consumers], [each.name for each in self.metas.processes]
            changes, faults = round_trips(draw, self.seconds, STRICT, consumers, metas, self.changes)
            self.changes, self.script = [*self.changes, *changes], [*self.script, *faults]

    def _outages(self) -> list[Outage]:
        draw = self.random
        if draw.random() < 0.6:
            return []
        at = draw.uniform(0.5, self.seconds)
        return [Outage(at, min(draw.choice([0.5, 2.0, 5.0]), self.seconds - at))]

    # --- the run --------------------------------------------------------------------------------

    def run(self) -> list[Violation]:
        try:
            with without_collections():
                return self._run()
        finally:
            self.metas.close()

    def _run(self) -> list[Violation]:
        sim = self.simulation
        with sim:
            self._start([*self.producers, *self.consumers])
            if self._early:
                sim.call_later(LOOK_SECONDS, self._look)
            sim.run_for(self.seconds)
            sim.heal()
            self.senders.sending = False
            self.members.settle()
            sim.process("operator").start(self._resume())
            try:
                self._drain()
                if self._emptied:
                    self._switch_off()
                    self._drain()
            except SimulationFailed as failure:
                failure.add_note(self._left())
                raise
            # A consumer that still holds a message handles it now. The check then reports a violation.
            end = sim.now + LEASE_SECONDS + 1.0
            sim.run_for(SHOW_SECONDS)
            while sim.now < end and self._open():
                sim.run_for(0.1)
            found = self.judge()
            assert found == [], "\n".join(map(str, found[:10]))
        return found

    def _switch_off(self) -> None:
        """Empty a broker group as the documentation says (R26), end its broker, and send more messages.

        All consumers restart, so that none of them has cached state.
        """
        sim = self.simulation
        client = sim.process("test").connect(ADDRESSES)
        sim.run(empty(sim, client, [STRICT, LOOSE], EMPTIED, OTHERS), seconds=120.0)
        for process in (*self.consumers, *self.producers, sim.process(EMPTIED)):
            self._fault(Fault("kill", sim.now, 0.0, process.name))
            process.kill()
        self.senders.sending = True
        for process in (*self.consumers, *self.producers):
            process.start()
        sim.run_for(SEND_SECONDS)
        self.senders.sending = False

    def _start(self, clients: Iterable[Process]) -> None:
        """Start the servers, then the clients, and schedule all faults and changes."""
        sim = self.simulation
        for process in (*self.metas.processes, *self.brokers):
            process.start()
        sim.run(self._create(), seconds=30.0)
        for process in clients:
            process.start()
        for change in self.changes:
            sim.call_later(change.at, self._begin_change, change)
        self.metas.play(self.outages)
        play(sim, self.script, self._fault)

    def _has_the_lock(self, process: Process, message: plait.Message, lock: int) -> None:
        """Check that a consumer that begins with a message owns its lock, according to the broker."""
        server = self.servers[message.partition.group]
        # A server that has just started has no broker yet, or one that is still recovering.
        broker = getattr(server, "broker", None)
        partition = None if broker is None else broker.subjects.get(message.partition.name)
        if partition is None:
            return
        group = partition.groups[GROUP]
        assert isinstance(group, OrderedGroup)
        owner, epoch = int(group.locks.owner[lock]), int(group.locks.epoch[lock])
        names = {consumer.id: client for client, consumer in group.consumers.items()}
        if names.get(owner) != process.name or epoch < message.epoch:
            text = f"{message!r} under epoch {message.epoch} of {lock}, which {names.get(owner)} has under {epoch}"
            self.simulation.fail(f"{process.name} began with {text}")

    def judge(self) -> list[Violation]:
        ordered = not self._affinity
        strict = check(self.histories[STRICT], ordered=ordered, moves=True, groups=[GROUP])
        loose = check(self.histories[LOOSE], strict=False, ordered=ordered, moves=True, groups=[GROUP])
        of_order = ("send_order", "order", "overlap", "epoch", "owners")
        return strict + [each for each in loose if each.kind not in of_order or each.key not in self.members.moved]

    def _drain(self) -> None:
        """Wait until everything that was sent is handled; fails when nothing was handled for a while."""
        sim, senders = self.simulation, self.senders
        healed, end = sim.now, sim.now + self._drain_seconds
        sim.run_until(
            lambda: senders.drained() or sim.now - max(healed, senders.progress) > self._quiet_seconds or sim.now > end,
            waiting_for="draining",
        )
        if not senders.drained():
            raise SimulationFailed(f"draining is not done, and nothing was handled since {senders.progress:.3f} s")

    def _look(self) -> None:
        """Fail if the strict subject's history already has a violation: later events cannot undo it."""
        found = check(self.histories[STRICT], moves=True, groups=[GROUP], drained=False)
        if found:
            self.simulation.fail("\n".join(map(str, found[:10])))
        self.simulation.call_later(LOOK_SECONDS, self._look)

    def _open(self) -> bool:
        """True if a broker has rows that are held, returned or waiting for a retry, or if a handler still runs."""
        groups = [
            group
            for server in self.servers.values()
            for partition in server.broker.partitions.values()
            for group in partition.groups.values()
        ]
        cursors = [cursor for group in groups if isinstance(group, OrderedGroup) for cursor in group.cursors]
        return any(cursor.held or cursor.returned or cursor.waiting for cursor in cursors) or any(
            handling.ended is None for history in self.histories.values() for handling in history.handlings
        )

    def _left(self) -> str:
        lines = [f"not handled: {sorted(self.senders.waiting)[:20]}"]
        for name, server in self.servers.items():
            for partition in server.broker.partitions.values():
                for group in partition.groups.values():
                    cursors = group.dump() if isinstance(group, OrderedGroup) else []
                    lines.append(f"{name} {partition.row.name} visible {partition.visible}: {cursors}"[:2000])
        return "\n".join(lines)

    def _fault(self, fault: Fault) -> None:
        names = {fault.process, fault.other}
        consumers = names & {process.name for process in self.consumers}
        # A fault of a meta server or a producer excuses no duplicates.
        brokers = set() if consumers else names & BROKERS.keys()
        excuse(self.histories.values(), fault, self.simulation.now, consumers=consumers, brokers=brokers)

    # --- the servers ----------------------------------------------------------------------------

    async def _serve(self, process: Process) -> None:
        config = msgspec.structs.replace(CONFIG, flush=self._flush, group=process.name)
        server = Server(process.disk, config, port=BROKERS[process.name], clock=process.clock, metas=ADDRESSES)
        self.servers[process.name] = server
        await server.start()
        assert server.failed is not None
        raise await server.failed

    # --- the operator ---------------------------------------------------------------------------

    async def _create(self) -> None:
        async with self.simulation.process("test").connect(ADDRESSES) as client:
            while len(await client._router.find_brokers()) < len(BROKERS):
                await self.simulation.sleep(0.1)
            for subject, order in ((STRICT, "strict"), (LOOSE, "best_tried")):
                await client.admin.create_subject(subject, order=order, partitions=PARTITIONS)

    def _begin_change(self, change: Change) -> None:
        self.simulation.log("operator", f"{change.subject} is to have {change.partitions} partitions")
        self.simulation.process("operator").start(self._expand(change))

    async def _expand(self, change: Change) -> None:
        try:
            async with self.simulation.process("operator").connect(ADDRESSES, limits=CLIENT_LIMITS) as client:
                await client.admin.expand_subject(change.subject, change.partitions)
        except PlaitError as error:
            # Other changes follow.
            self.simulation.log("operator", f"not done: {error}")

    async def _resume(self) -> None:
        """Resume parked keys and resend dead letters until there are none."""
        process = self.simulation.process("operator")
        while not self.senders.drained():
            try:
                async with process.connect(ADDRESSES, limits=CLIENT_LIMITS) as client:
                    while not self.senders.drained():
                        # Only the strict subject parks keys; its rows without keys become dead letters.
                        await client.admin.resend_dead(LOOSE, GROUP)
                        await client.admin.resend_dead(STRICT, GROUP)
                        if not self._affinity:
                            await client.admin.resume_all(STRICT, GROUP)
                        await self.simulation.sleep(1.0)
            except PlaitError:
                await self.simulation.sleep(1.0)
