"""Defects in the logs of a good run are found, each with its name and place: in the logs, and in an archive."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from plait.errors import DamageError
from plait.spark.auditing.report import AuditReport
from plait.storage.logs.action_events import Action
from plait.testing import EmbeddedBroker
from tests.spark.archives import archive_here
from tests.spark.auditing.conftest import Audit, one_group
from tests.spark.auditing.defects import Events, copied, is_ack, swapped_acks, with_actions, without_message
from tests.spark.auditing.test_live import SUBJECT, consume

COUNT = 12


async def one_by_one(data: Path, **settings: object) -> None:
    """Each message has its own frame, and so have its events. Two consumers, one after the other."""
    async with EmbeddedBroker(data) as broker, broker.connect() as client:
        await client.admin.create_subject(SUBJECT, order="strict")
        for half in range(2):
            async with client.consumer(SUBJECT, group="billing", **settings) as consumer:  # type: ignore[arg-type]
                for number in range(half * COUNT // 2, (half + 1) * COUNT // 2):
                    await client.send(SUBJECT, b"%d" % number, key=f"k-{number % 2}")
                    await consume(consumer, 1)


@pytest.fixture(params=["live", "archive"])
def audited(request: pytest.FixtureRequest, audit: Audit, monkeypatch: pytest.MonkeyPatch) -> Audit:
    """An audit of a data directory, or of an archive of that directory."""
    if request.param == "live":
        return audit

    def archived(data: Path, *, skip_damage: bool = False) -> AuditReport:
        to = data.with_name(f"{data.name}-archive")
        archive_here(data, to, now=True, skip_damage=skip_damage)
        return audit(archive=to)

    return archived


@pytest.fixture
async def good(tmp_path: Path) -> Path:
    await one_by_one(tmp_path / "good")
    return tmp_path / "good"


@pytest.fixture
async def ordered(tmp_path: Path) -> Path:
    await one_by_one(tmp_path / "ordered", ordered=True)
    return tmp_path / "ordered"


def test_rewritten_logs_without_a_defect_are_good(good: Path, ordered: Path, tmp_path: Path, audited: Audit):
    for number, data in enumerate((good, ordered)):
        with_actions(data, tmp_path / f"again-{number}", lambda events: events)
        report = audited(tmp_path / f"again-{number}")
        assert report.held
        assert one_group(report).acked == COUNT


@pytest.mark.parametrize("sequence", [0, 5])
def test_a_message_that_is_missing_in_the_log(good: Path, tmp_path: Path, audited: Audit, sequence: int):
    without_message(good, tmp_path / "bad", sequence)
    report = audited(tmp_path / "bad")
    assert not report.held
    (subject,) = report.subjects
    assert (subject.messages, subject.missing) == (COUNT - 1, 1)
    assert [(example.promise, example.sequence) for example in subject.examples] == [("missing", sequence)]


def test_a_message_that_was_never_delivered(good: Path, tmp_path: Path, audited: Audit):
    with_actions(good, tmp_path / "bad", lambda events: events[(events["start"] != 5) | (events["end"] != 6)])
    group = one_group(audited(tmp_path / "bad"))
    assert group.broken == ["lost"]
    assert [(example.promise, example.sequence) for example in group.examples] == [("lost", 5)]


async def test_messages_that_were_overtaken_and_never_delivered(tmp_path: Path, audited: Audit):
    async with EmbeddedBroker(tmp_path / "good") as broker, broker.connect() as client:
        for priority in (0, 0, 0, 9):
            await client.send(SUBJECT, b"x", priority=priority)
        async with client.consumer(SUBJECT, group="billing") as consumer:
            (urgent,) = await consume(consumer, 1)
            assert urgent.priority == 9
            await consume(consumer, 3)
            await client.send(SUBJECT, b"x")
            await consume(consumer, 1)

    # Its delivery may still come, until the log has a delivery that overtook nothing.
    for last, lost in ((4, 0), (5, 3)):
        bad = tmp_path / f"bad-{last}"
        with_actions(tmp_path / "good", bad, partial(naming, 4, last))
        group = one_group(audited(bad))
        assert (group.lost, group.pending) == (lost, 5 - (last - 3) - lost)
        assert group.broken == ["lost"] * (lost > 0)


def naming(first: int, last: int, events: Events) -> Events:
    """The events whose end is in [first, last]."""
    found: Events = events[(events["end"] >= first) & (events["end"] <= last)]
    return found


def test_swapped_acks_of_one_key(ordered: Path, tmp_path: Path, audited: Audit):
    swapped_acks(ordered, tmp_path / "bad", 4, 6)
    group = one_group(audited(tmp_path / "bad"))
    assert group.broken == ["out_of_order"]
    assert [example.sequence for example in group.examples] == [6]


@pytest.mark.parametrize(("one", "other"), [(2, 4), (4, 5)], ids=["one owner", "two keys"])
def test_swapped_acks_that_are_no_defect(ordered: Path, tmp_path: Path, audited: Audit, one: int, other: int):
    """An owner may ack the messages that it holds in any order, and each key has its own order."""
    swapped_acks(ordered, tmp_path / "fine", one, other)
    assert audited(tmp_path / "fine").held


@pytest.mark.parametrize("kind", ["good", "ordered"])
def test_a_double_ack(kind: str, tmp_path: Path, audited: Audit, request: pytest.FixtureRequest):
    data: Path = request.getfixturevalue(kind)

    def change(events: Events) -> Events:
        again = events[is_ack(events, 7)]
        if kind == "good":
            again["holder"] += 100
        return np.concatenate([events, again])

    with_actions(data, tmp_path / "bad", change)
    group = one_group(audited(tmp_path / "bad"))
    assert group.broken == ["double_acks"]
    assert [example.sequence for example in group.examples] == [7]


def test_an_ack_of_a_message_that_was_never_stored(good: Path, tmp_path: Path, audited: Audit):
    def change(events: Events) -> Events:
        events["end"][is_ack(events, COUNT - 1)] += 3
        return events

    with_actions(good, tmp_path / "bad", change)
    group = one_group(audited(tmp_path / "bad"))
    assert group.broken == ["invented"]
    assert group.invented == 3


def test_a_message_that_two_consumers_hold(good: Path, tmp_path: Path, audited: Audit):
    def change(events: Events) -> Events:
        pulls = events[(events["action"] == Action.PULL) & (events["start"] == 5)]
        pulls["holder"] += 100
        return np.concatenate([events, pulls])

    with_actions(good, tmp_path / "bad", change)
    assert "delivered_twice" in one_group(audited(tmp_path / "bad")).broken


async def test_damage_is_an_error_or_counts_as_missing(good: Path, audited: Audit):
    (segment,) = (good / "message").glob("*.log")
    data = bytearray(segment.read_bytes())
    at = data.index(b"k-1" + b"\0" * 5)
    data[at] ^= 1
    segment.write_bytes(data)
    with pytest.raises(DamageError):
        audited(good)
    report = audited(good, skip_damage=True)
    assert not report.held
    assert report.subjects[0].missing == 1


async def test_damage_of_all_frames_of_a_partition_counts_as_missing(tmp_path: Path, audited: Audit):
    async with EmbeddedBroker(tmp_path / "good") as broker, broker.connect() as client:
        await client.send(SUBJECT, b"body-0")
        await client.send("others", b"x")
    # No checkpoint counts these messages.
    copied(tmp_path / "good", tmp_path / "bad")
    (segment,) = (tmp_path / "bad" / "message").glob("*.log")
    content = bytearray(segment.read_bytes())
    content[content.index(b"body-0")] ^= 1
    segment.write_bytes(content)
    report = audited(tmp_path / "bad", skip_damage=True)
    assert not report.held
    assert [(each.subject, each.messages, each.missing) for each in report.subjects] == [
        (SUBJECT, 0, 1),
        ("others", 1, 0),
    ]


async def test_damage_of_the_last_message_of_a_partition_counts_as_missing(tmp_path: Path, audited: Audit):
    data = tmp_path / "data"
    async with EmbeddedBroker(data) as broker, broker.connect() as client:
        for number in range(3):
            await client.send(SUBJECT, b"body-%d" % number)
        await client.send("alone", b"body-3")
        for _ in range(5):
            await client.send("others", b"x" * 200)
    (segment,) = (data / "message").glob("*.log")
    content = bytearray(segment.read_bytes())
    for body in (b"body-2", b"body-3"):
        # A frame size that points nowhere: the partition of the frame is not known any more.
        content[content.rindex(b"PL", 0, content.index(body)) + 4] ^= 0xFF
    segment.write_bytes(content)
    report = audited(data, skip_damage=True)
    assert not report.held
    assert [(each.subject, each.messages, each.missing) for each in report.subjects] == [
        ("alone", 0, 1),
        (SUBJECT, 2, 1),
        ("others", 5, 0),
    ]
