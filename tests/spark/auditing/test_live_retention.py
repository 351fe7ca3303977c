"""Audits of data directories from which retention removed segments: expired messages are not missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.spark.archives import Filler
from tests.spark.auditing.conftest import Audit, one_group


def make_room(filler: Filler) -> None:
    """Make checkpoints that need no older segments."""
    for _ in range(6):
        filler.node.send("others", b"x" * 4000)
        filler.node.checkpoint()


def first_sequence(filler: Filler) -> int:
    return filler.node.partition("orders").start


def test_messages_that_expired_since_the_checkpoint_are_not_missing(tmp_path: Path, audit: Audit):
    filler = Filler(tmp_path, retention_seconds=20.0)
    filler.rounds(40)
    filler.node.retention.run()
    make_room(filler)
    recorded = first_sequence(filler)
    filler.node.clock.advance(15.0)
    # Retention removes more than the checkpoints record.
    filler.node.retention.run()
    filler.node.turn()
    report = audit(tmp_path, subjects=["orders"])
    assert 0 < recorded < report.subjects[0].partitions[0].first
    assert report.subjects[0].missing == 0
    assert report.held
    assert report.subjects[0].messages > 0
    filler.stop()


@pytest.mark.parametrize("checkpoint", [True, False])
def test_events_of_messages_that_have_all_expired_break_no_promise(tmp_path: Path, audit: Audit, checkpoint: bool):
    data = tmp_path / "data"
    filler = Filler(data, retention_seconds=5.0)
    filler.rounds(40)
    filler.node.clock.advance(100.0)
    make_room(filler)
    filler.node.retention.run()
    assert filler.node.broker.message_log.start > 0
    copy = tmp_path / "copy"
    shutil.copytree(data, copy)
    filler.stop()
    if not checkpoint:
        shutil.rmtree(copy / "checkpoints")
    report = audit(copy, subjects=["orders"])
    (subject,) = report.subjects
    assert (subject.messages, subject.missing) == (0, 0)
    assert one_group(report).invented == 0
    assert report.held
    place = (subject.partitions[0].first, subject.partitions[0].end)
    assert place == ((120, 120) if checkpoint else (0, 0))
