"""Meta servers and brokers of a simulated world, with faults of their database and disks."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from plait.broker import BrokerConfig
from plait.errors import DiskFull, StorageFailed
from plait.limits import KIB, MIB
from plait.server import Server
from plait.storage.marks import ArchiveMark, read_archived, write_archived
from plait.testing.sim import Process, Simulation
from plait.testing.simulated_disk import SimulatedCrash
from tests.sim.meta_servers import ADDRESSES, LIMITS, MetaServers
from tests.sim.world.plan import DiskFault, Plan
from tests.sim.world.transactions import with_quick_checks

BROKER_PORT = 7451
CONFIG = BrokerConfig(
    copy_partitions=1,
    message_segment_size=32 * KIB,
    action_segment_size=16 * KIB,
    retained_segment_size=8 * KIB,
    checkpoint_seconds=0.7,
    housekeeping_seconds=0.5,
    disk_used_max=1.0,
    disk_free_min=1 * MIB,
    limits=with_quick_checks(LIMITS),
)
#: A broker that ended is started again after this long.
RESTART_SECONDS = 0.2
#: The interval between two runs of an archiver.
ARCHIVE_SECONDS = 1.5


class Machines:
    """The servers of one world."""

    def __init__(self, simulation: Simulation, plan: Plan) -> None:
        self.simulation = simulation
        self.plan = plan
        self.metas = MetaServers(simulation, auto_create=plan.auto_create)
        self.brokers = {name: simulation.process(name, self._broker) for name in plan.brokers}
        self.servers: dict[str, Server] = {}
        #: Brokers whose next sync fails and that lose power afterwards.
        self._sync_fails: dict[str, DiskFault] = {}

    def start(self) -> None:
        for process in (*self.metas.processes, *self.brokers.values()):
            process.start()

    def play(self) -> None:
        """Schedule the plan's faults of disks and of the database."""
        for fault in self.plan.disk_faults:
            self.simulation.call_later(fault.at, self._begin, fault)
        if self.plan.archived:
            for name in self.brokers:
                self.simulation.call_later(ARCHIVE_SECONDS, self._archive, name)
        self.metas.play(self.plan.outages)

    def heal(self) -> None:
        """End all faults of disks and of the database."""
        self.metas.heal()
        self._sync_fails.clear()
        for process in self.brokers.values():
            process.disk._faults.clear()
            process.disk.capacity = max(process.disk.capacity, 256 * MIB)

    # --- servers --------------------------------------------------------------------------------

    async def _broker(self, process: Process) -> None:
        config = msgspec.structs.replace(
            CONFIG, flush=self.plan.flush, group=process.name, archive_before_delete=self.plan.archived
        )
        port = BROKER_PORT + self.plan.brokers.index(process.name)
        server = Server(process.disk, config, port=port, clock=process.clock, metas=ADDRESSES)
        # The last server of this process has ended, and this one has no logs until it has started.
        self.servers.pop(process.name, None)
        try:
            await server.start()
            self.servers[process.name] = server
            assert server.failed is not None
            raise await server.failed
        except (StorageFailed, DiskFull) as failure:
            self.simulation.log(process.name, f"ends: {failure}")
            # Outside of the process, because its loop ends with it.
            self.simulation.call_later(0.0, self._ended, process)

    def _ended(self, process: Process) -> None:
        """Restart a broker whose storage failed, on the same page cache. Later the power may fail."""
        process.kill()
        self.simulation.call_later(RESTART_SECONDS, _start, process)
        fault = self._sync_fails.pop(process.name, None)
        if fault is not None and self.plan.flush == "sync":
            self.simulation.call_later(RESTART_SECONDS + fault.seconds, self._lose_power, process)

    def _lose_power(self, process: Process) -> None:
        process.kill(power_loss=True)
        self.simulation.call_later(RESTART_SECONDS, _start, process)

    # --- archives -------------------------------------------------------------------------------

    def _archive(self, name: str) -> None:
        """Run a slow archiver: each run moves the archive mark of a log by one segment, if the segment is durable."""
        self.simulation.call_later(ARCHIVE_SECONDS, self._archive, name)
        process = self.brokers[name]
        if not process.alive or name not in self.servers:
            return
        if wrong := self._deleted_too_early(name):
            self.simulation.fail(wrong)
        noted = read_archived(process.disk)
        offsets = [noted.message_offset, noted.retained_offset, noted.action_offset]
        number = process.random.randrange(len(offsets))
        log = self.servers[name].broker.logs[number]
        ends = [segment.base for segment in log.segments if offsets[number] < segment.base <= log.durable]
        offsets[number] = min(ends, default=offsets[number])
        # It tries again later, also after an error of the disk or the machine.
        with suppress(OSError, SimulatedCrash):
            write_archived(process.disk, ArchiveMark(offsets[0], offsets[2], retained_offset=offsets[1]))

    def deleted_too_early(self) -> list[str]:
        """Log segments that brokers deleted before they were archived."""
        if not self.plan.archived:
            return []
        alive = [name for name in self.servers if self.brokers[name].alive]
        return [wrong for name in alive if (wrong := self._deleted_too_early(name))]

    def _deleted_too_early(self, name: str) -> str:
        noted = read_archived(self.brokers[name].disk)
        offsets = noted.message_offset, noted.retained_offset, noted.action_offset
        for log, offset in zip(self.servers[name].broker.logs, offsets, strict=True):
            first = log.segments[0].base if log.segments else 0
            if first > offset:
                return f"{name} deleted {log.directory} up to {first}, and only {offset} is archived"
        return ""

    # --- failures -------------------------------------------------------------------------------

    def _begin(self, fault: DiskFault) -> None:
        process = self.brokers[fault.broker]
        if not process.alive:
            return
        self.simulation.log(fault.broker, f"has a fault of its disk: {fault.kind}")
        match fault.kind:
            case "sync":
                self._sync_fails[fault.broker] = fault
                process.disk.fail("sync", path=process.random.choice(("message/*", "action/*", "retained/*", "*")))
            case "full":
                free, capacity = process.disk.space()
                process.disk.capacity = capacity - free
                self.simulation.call_later(fault.seconds, self._more_room, process)
            case "checkpoint":
                self._damage_checkpoint(process)

    def _more_room(self, process: Process) -> None:
        process.disk.capacity = max(process.disk.capacity, 256 * MIB)

    def _damage_checkpoint(self, process: Process) -> None:
        """Damage the newest checkpoint while the broker is down, so that it starts from the checkpoint before."""
        process.kill()
        disk = process.disk
        manifests = [name for name in disk.list("checkpoints") if name.startswith("manifest-") and "." not in name]
        if manifests:
            path = f"checkpoints/{max(manifests)}"
            size = len(disk.read(path))
            disk.flip_bit(path, process.random.randrange(size), process.random.randrange(8))
        self.simulation.call_later(RESTART_SECONDS, _start, process)


def _start(process: Process) -> None:
    if not process.alive:
        process.start()
