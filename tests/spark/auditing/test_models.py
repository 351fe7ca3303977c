"""No false alarms: models of shared and ordered groups run, and their logs and archives are audited."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from plait.spark.auditing.report import AuditReport
from plait.testing.simulated_disk import SimulatedDisk
from tests.broker.test_ordered_model import World
from tests.broker.test_priority_model import PriorityModel
from tests.broker.test_retry_model import Retrying
from tests.sim.cluster import Cluster
from tests.sim.ordered_cluster import OrderedCluster
from tests.spark.archives import archive_here
from tests.spark.auditing.conftest import audit_here, one_group
from tests.spark.auditing.test_archived import counts


def audit_simulated(disk: SimulatedDisk, *, archived: bool = False) -> AuditReport:
    """Audit the files of a simulated disk; ``archived``: an archive of them gives the same report."""
    with tempfile.TemporaryDirectory(prefix="plait-") as root:
        data, to = Path(root, "data"), Path(root, "archive")
        for directory in ("message", "action", "retained", "checkpoints"):
            (data / directory).mkdir(parents=True)
            for name in disk.list(directory):
                (data / directory / name).write_bytes(disk.open(f"{directory}/{name}").view())
        report = audit_here(data)
        if archived:
            archive_here(data, to, now=True)
            again = audit_here(archive=to)
            assert again.held, again
            assert counts(again) == counts(report)
            assert [each.messages for each in again.subjects] == [each.messages for each in report.subjects]
        return report


@pytest.mark.parametrize(("seed", "flush"), [(0, "async"), (1, "sync")])
def test_an_ordered_group_with_changing_and_failing_owners_and_broker_crashes(seed: int, flush: str):
    # Expired messages are in neither log, so no verdict on them would be possible.
    world = World(seed, flush, expires=False)
    world.join()
    for _ in range(3):
        for _ in range(80):
            world.step()
        world.node.turn()
        world.node.sync()
        report = audit_simulated(world.node.disk)
        assert report.held, report
    world.drain()
    world.node.sync()
    report = audit_simulated(world.node.disk, archived=seed < 2)
    assert report.held, report
    group = one_group(report)
    assert group.acked == group.messages == world.number


@pytest.mark.parametrize("seed", [1, 4])
def test_a_simulated_broker_with_shared_groups_through_faults_and_power_failures(seed: int):
    cluster = Cluster(seed, flush="sync" if seed % 2 else "async")
    cluster.run()
    report = audit_simulated(cluster.broker.disk, archived=True)
    assert report.held, report
    assert sum(group.acked for group in report.groups()) > 20


@pytest.mark.parametrize(("seed", "affinity"), [(1, False), (2, True)])
def test_simulated_brokers_with_ordered_groups_through_faults_and_route_changes(seed: int, affinity: bool):
    cluster = OrderedCluster(seed, affinity=affinity)
    cluster.run()
    for broker in cluster.brokers:
        report = audit_simulated(broker.disk, archived=True)
        assert report.held, report


class Overtaking(PriorityModel):
    """A group whose rows overtake others. ``kept``: no rewinds, and retention removes nothing: every row is judged."""

    def __init__(self, seed: int, *, kept: bool) -> None:
        super().__init__(seed)
        self.kept = kept

    def rewind(self) -> None:
        if not self.kept:
            super().rewind()

    def expire(self) -> None:
        if not self.kept:
            super().expire()

    def audit(self, *, archived: bool = False) -> None:
        self.node.turn()
        self.node.sync()
        report = audit_simulated(self.node.disk, archived=archived)
        assert report.held, report
        found, cursor, group = one_group(report), self.group.cursor, self.group
        if self.kept:
            unbegun = sum(last - first for first, last in cursor.unbegun(0, group.partition.visible))
            assert found.messages == len(self.ranks)
            assert found.in_flight == cursor.held_count
            # Rows that a consumer returned before it began them are returned rows of the audit.
            assert found.pending + found.returned == unbegun + cursor.returned.count + cursor.waiting.count
            assert found.pending <= unbegun
            assert found.dead == group.failures.dead.count


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_groups_whose_rows_overtake_others(seed: int, kept: bool):
    audit_overtaking(seed, kept=kept, archived=kept and seed < 2)


def audit_overtaking(seed: int, *, kept: bool, archived: bool = False) -> None:
    model = Overtaking(seed, kept=kept)
    for _ in range(3):
        for _ in range(30):
            model.step()
        model.audit()
    model.drain()
    model.audit(archived=archived)


class Audited(Retrying):
    """A shared group whose messages fail, wait, die, are resent and acked late, with restarts in between."""

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "node") or not self.messages:
            return
        self.node.turn()
        self.node.sync()
        report = audit_simulated(self.node.disk)
        assert report.held, report
        for group in report.groups():
            # The audit counts purged messages as dead, and does not count those that were done before a rewind.
            handled = [message for message in self.messages if not message.before]
            dead = sum(bool(message.dead or message.purged) for message in handled)
            acked = sum(message.done and not message.purged for message in handled)
            held = len(handled) - acked - dead
            assert (group.messages, group.acked, group.dead, group.in_flight) == (len(handled), acked, dead, held)


TestAudited = Audited.TestCase
TestAudited.settings = settings(max_examples=30, stateful_step_count=40, deadline=None, phases=[Phase.generate])
