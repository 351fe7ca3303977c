"""``World``: runs a plan, ends all faults, waits until everything is handled, and checks the ledger."""

from __future__ import annotations

import random

from plait.testing.sim import Fault, Simulation, SimulationFailed, play
from tests.sim.meta_servers import LEASE_SECONDS
from tests.sim.users import DRAIN_SECONDS, QUIET_SECONDS, SHOW_SECONDS, excuse, without_collections
from tests.sim.world.judge import judge
from tests.sim.world.ledger import Ledger
from tests.sim.world.machines import Machines
from tests.sim.world.members import Members, names_of
from tests.sim.world.moved_sends import recording_moves
from tests.sim.world.operator import Operator
from tests.sim.world.plan import CLIENTS, DOOMED, PRODUCERS, READER, Plan, draw_plan
from tests.sim.world.queries import QUERIER, Querying
from tests.sim.world.readers import Reading
from tests.sim.world.recurring import SECONDS_MAX, Recurring
from tests.sim.world.requests import Requests
from tests.sim.world.senders import Senders
from tests.sim.world.transactions import Transacting

#: Errors that Plait logs when handlers and disks fail.
ALLOWED_LOGS = ("*storage*", "*disk*", "*sync*", "Members.*", "Requests.*", "*checkpoint*")
#: How long producers send after a broker group was switched off.
SEND_SECONDS = 1.5


class World:
    """``run`` runs one seed. ``plan`` replaces the plan of the seed. ``seconds`` is how long the seed's plan lasts."""

    def __init__(
        self, seed: int, *, seconds: float = 6.0, plan: Plan | None = None, quiet_seconds: float = QUIET_SECONDS
    ) -> None:
        self.plan = plan = plan or draw_plan(seed, seconds)
        self.simulation = sim = Simulation(seed, allow_logs=ALLOWED_LOGS)
        self.ledger = Ledger(plan)
        self.machines = Machines(sim, plan)
        self.operator = Operator(sim, plan, self.ledger)
        self.senders = Senders(sim, plan, self.ledger)
        self.transacting = self.senders.transacting = Transacting(sim, plan, self.ledger)
        self.members = Members(sim, plan, self.ledger)
        self.reading = Reading(sim, plan, self.ledger)
        self.recurring = Recurring(sim, plan, self.ledger)
        self.querying = Querying(sim, plan, self.ledger)
        self.requests = Requests(sim, plan, self.ledger)
        self._quiet_seconds = quiet_seconds
        self.users = [sim.process(name, self.requests.asking(self.senders.run)) for name in PRODUCERS]
        self.users += [sim.process(name, self.requests.answering(self.members.main(name))) for name in CLIENTS]
        self._reader = sim.process(READER, self.reading.run)
        if plan.queries:
            sim.process(QUERIER, self.querying.run)
        self._skew()

    def _skew(self) -> None:
        """Set the wall clock of each machine to a different time."""
        draw = random.Random(f"{self.plan.seed} skew")
        for process in self.simulation.processes.values():
            process.jump(draw.uniform(-self.plan.skew, self.plan.skew))

    def run(self) -> None:
        try:
            with without_collections(), recording_moves(self.members.moved), self.simulation:
                self._run()
        finally:
            self.machines.metas.close()

    def _run(self) -> None:
        sim = self.simulation
        self.machines.start()
        sim.run(self.operator.create(), seconds=60.0)
        sim.run(self.recurring.create(), seconds=60.0)
        sim.run(self.requests.create(), seconds=60.0)
        for user in (*self.users, self._reader):
            user.start()
        if self.plan.queries:
            sim.process(QUERIER).start()
        self.machines.play()
        self.operator.play()
        self.recurring.play()
        self.requests.play()
        play(sim, self.plan.script, self._fault)
        sim.run_for(self.plan.seconds)
        self.machines.heal()
        sim.heal()
        self.senders.sending = False
        self.members.settle()
        self.reading.settle()
        self.querying.settled = True
        self.requests.settled = True
        self._settle()
        self._finish()
        sim.run(self.querying.check(), seconds=60.0)
        sim.run(self.recurring.check(), seconds=2 * SECONDS_MAX)
        sim.run(self.requests.check(), seconds=2 * SECONDS_MAX)
        if self.plan.emptied is not None:
            self._switch_off(self.plan.emptied)
            self._finish()
        sends = (send for history in self.ledger.histories.values() for send in history.sends)
        undecoded = {str(send.key) for send in sends if send.value in self.members.undecoded}
        found = judge(self.ledger, self.members.moved | undecoded) + self.machines.deleted_too_early()
        assert not found, "\n".join(found[:10])

    def _settle(self) -> None:
        """Start what ends a run: decisions of transactions, dead letters and parked keys."""
        self.simulation.process("operator").start(self.operator.resume(self.drained))
        if self.plan.transactions:
            self.transacting.settling = True
            self.simulation.process("settler").start(self.transacting.settle(self.simulation.process("settler")))

    def _finish(self) -> None:
        self._drain()
        self.simulation.run_for(SHOW_SECONDS if self.plan.calm else SHOW_SECONDS + LEASE_SECONDS)
        # A nack that was confirmed meanwhile adds its message to those that must be handled.
        self._drain()

    def _switch_off(self, group: str) -> None:
        """Empty a broker group as the documentation says and end its broker; start all clients again and send more."""
        sim = self.simulation
        sim.run(self.operator.empty(group), seconds=120.0)
        self.reading.end()
        for process in (*self.users, self._reader, self.machines.brokers[group]):
            self._fault(Fault("kill", sim.now, 0.0, process.name))
            process.kill()
        self.senders.sending = True
        for user in self.users:
            user.start()
        sim.run_for(SEND_SECONDS)
        self.senders.sending = False
        if self.plan.forgotten:
            sim.process("operator").start(self.operator.forget(group))
            sim.process("operator").start(self.operator.resume(self.drained))

    def drained(self) -> bool:
        return (
            not self.ledger.sending()
            and not any(
                missing
                for group in self.plan.groups
                if group.subject != DOOMED and (group.mode != "once" or self._all_once())
                for missing in self.ledger.missing(group).values()
            )
            and not self.reading.missing()
        )

    def _all_once(self) -> bool:
        """Whether at-most-once groups must get every message: nothing fails, including decoders."""
        return self.plan.calm and not self.plan.cancels and not self.plan.failures

    def _drain(self) -> None:
        sim = self.simulation
        healed, end = sim.now, sim.now + DRAIN_SECONDS
        while not self.drained():
            sim.run_for(0.2)
            if sim.now - max(healed, self.ledger.progress) > self._quiet_seconds or sim.now > end:
                raise SimulationFailed(f"draining is not done: {self._left()}\n{self.plan}")

    def _left(self) -> str:
        lines = [
            f"{group}: {holder[2]} {sorted(missing)}"
            for group in self.plan.groups
            for holder, missing in self.ledger.missing(group).items()
            if missing
        ]
        lines.append(f"not read: {self.reading.missing()[:20]}")
        lines.append(f"sends that run: {sorted(self.ledger.running)[:20]}")
        return "\n".join(lines)

    def _fault(self, fault: Fault) -> None:
        processes = {fault.process, fault.other}
        consumers = processes & {*CLIENTS}
        brokers = set() if consumers else processes & {*self.plan.brokers}
        names = [name for consumer in consumers for name in names_of(consumer)]
        excuse(self.ledger.histories.values(), fault, self.simulation.now, consumers=names, brokers=brokers)
