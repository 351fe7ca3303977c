"""No false alarm, whatever happens: the models of shared and ordered groups run, and their logs are audited."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from plait.spark.auditing.report import AuditReport
from plait.testing.disk import SimulatedDisk
from tests.broker.test_ordered_model import World
from tests.broker.test_retry_model import Retrying
from tests.spark.auditing.conftest import audit_here, one_group


def audit_simulated(disk: SimulatedDisk) -> AuditReport:
    """An audit of the files as they are on a simulated disk."""
    with tempfile.TemporaryDirectory(prefix="plait-") as root:
        for directory in ("message", "action", "kept", "checkpoints"):
            names = disk.list(directory)
            Path(root, directory).mkdir()
            for name in names:
                Path(root, directory, name).write_bytes(disk.open(f"{directory}/{name}").view())
        return audit_here(Path(root))


@pytest.mark.parametrize("flush", ["async", "sync"])
@pytest.mark.parametrize("seed", range(5))
def test_an_ordered_group_whose_owners_come_go_and_fail_and_whose_broker_crashes(seed: int, flush: str):
    world = World(seed, flush)
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
    report = audit_simulated(world.node.disk)
    assert report.held, report
    group = one_group(report)
    assert group.acked == group.messages == world.number


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
            # What was purged is done to the model, and was a dead letter.
            assert group.acked + group.dead == sum(bool(message.done or message.dead) for message in self.messages), (
                group
            )


TestAudited = Audited.TestCase
TestAudited.settings = settings(max_examples=15, stateful_step_count=40, deadline=None, phases=[Phase.generate])
