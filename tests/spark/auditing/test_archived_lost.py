"""Audits of incomplete archives: what retention removed before it was archived breaks no promise."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from plait.spark.archiving.manifest import Archive
from plait.spark.auditing.job import open_input
from plait.spark.inputs.audit_input import AuditInput
from plait.spark.runtime.job_runner import NoProgress
from tests.spark.archives import Filler, archive_here
from tests.spark.auditing.conftest import Audit, one_group
from tests.spark.test_intake import expire
from tests.support.broker_node import Producer


def consume(filler: Filler) -> None:
    """Ack all messages."""
    consumer = filler.consumers["orders"]
    while ranges := filler.node.pull(consumer).ranges:
        for start, end, _ in ranges:
            filler.node.ack(consumer, (start, end))
        filler.node.turn()


def test_an_archive_that_retention_overtook(data: Path, to: Path, audit: Audit):
    filler = Filler(data, retention_seconds=5.0)
    filler.rounds(10)
    consumers, filler.consumers = filler.consumers, {}
    filler.rounds(10)
    archive_here(data, to, now=True)
    # Some acks of archived messages were removed before they were archived.
    filler.consumers = consumers
    consume(filler)
    filler.rounds(30)
    expire(filler)
    filler.rounds(10)
    archive_here(data, to, now=True)
    filler.stop()
    (source,) = Archive.at(to).open().sources.values()
    assert {each.log for each in source.left_out} == {"message", "action"}
    report = audit(archive=to, subjects=["orders"])
    group = one_group(report)
    assert report.held
    assert (report.subjects[0].missing, group.lost) == (0, 0)
    assert (group.unknown, group.acked) == (30, group.messages - 30)


def test_messages_that_are_missing_in_an_archive_that_retention_overtook_are_reported(
    data: Path, to: Path, audit: Audit
):
    filler = Filler(data, retention_seconds=5.0)
    filler.rounds(10)
    archive_here(data, to, now=True)
    filler.rounds(30)
    expire(filler)
    filler.rounds(40)
    filler.stop()
    path = sorted((data / "message").iterdir())[-2]
    content = bytearray(path.read_bytes())
    # A frame size that points nowhere.
    content[content.index(b"PL", 2000) + 4] ^= 0xFF
    path.write_bytes(content)
    archive_here(data, to, now=True, skip_damage=True)
    assert audit(archive=to, subjects=["orders"]).subjects[0].missing == 3


def test_each_of_two_data_directories_starts_with_its_own_action_log(to: Path, tmp_path: Path, audit: Audit):
    for name in ("g1", "g2"):
        filler = Filler(tmp_path / name)
        # No two producers have the same id.
        filler.producer = Producer(5 if name == "g1" else 6)
        filler.rounds(40)
        if name == "g2":
            for _ in range(6):
                filler.rounds(10)
                filler.node.checkpoint()
            filler.node.retention.run()
            assert filler.node.broker.action_log.start > 0
        filler.stop()
        archive_here(tmp_path / name, to, now=True, group=name)
    report = audit(archive=to)
    group = one_group(report)
    assert report.held
    assert (group.lost, group.messages) == (0, 120 + 300)
    assert 0 < group.unknown < 300


def slots(source: AuditInput) -> list[int]:
    return [int(slot) for number in range(len(source)) for block in source.blocks(number) for slot in block.rows.lps]


def test_a_message_is_in_the_slot_that_it_was_sent_to(data: Path, to: Path):
    filler = Filler(data)
    hashes = np.array([1, 2, 1023], np.uint64)
    filler.node.submit(filler.producer.frame("orders", b"a", b"b", b"c", keys=["x", "y", "z"], key_hashes=hashes))
    filler.node.turn()
    filler.stop()
    archive_here(data, to, now=True)
    live = open_input(data, None, subjects=["orders"], progress=NoProgress())
    archived = open_input(None, to, subjects=["orders"], progress=NoProgress())
    assert slots(archived) == slots(live) == [1, 2, 1023]
