"""This version opens data directories of the first version and recovers everything in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import plait
from plait.broker import Broker, BrokerConfig
from plait.broker.groups.group import Group
from plait.clock import ManualClock
from plait.frame.builder import build_frame
from plait.frame.view import FrameView
from plait.storage.disk import RealDisk
from plait.testing import EmbeddedBroker
from plait.testing.embedded_broker import TEST_CONFIG
from tests.golden.make_data import DIRECTORIES, DIRECTORY, Writer, extract

NAMES = sorted(path.name.removesuffix(".tar.xz") for path in DIRECTORY.glob("*.tar.xz"))


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def expected(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DIRECTORY / f"{name}.json").read_text())
    return content


@pytest.fixture
def root(name: str, tmp_path: Path) -> Path:
    """A copy of the golden directory, because opening it changes it."""
    extract(name, tmp_path)
    return tmp_path


def opened(root: Path, expected: dict[str, Any]) -> Broker:
    config = BrokerConfig(message_segment_size=16 * 1024, action_segment_size=8 * 1024, disk_free_min=0)
    return Broker(RealDisk(root), ManualClock(expected["time"]), config)


def position(group: Group) -> dict[str, Any]:
    log = group.cursor
    return {
        "next": log.next,
        "floor": log.floor,
        "returned": [list(piece) for piece in log.returned],
        "held": {c.client: [list(p) for p in log.held[c.id]] for c in group.consumers.values() if c.id in log.held},
        "broadcast": group.definition.broadcast,
        "delivery": group.definition.delivery,
    }


def test_the_recovered_state_is_that_of_the_writer(expected: dict[str, Any], root: Path):
    broker = opened(root, expected)
    report = broker.start()
    assert report.clean == expected["clean"]
    assert broker.turn.epoch == expected["epoch"]
    assert sorted((damage.log, damage.kind) for damage in report.damages) == [(log, "torn") for log in expected["torn"]]
    assert sorted(broker.subjects) == sorted(expected["subjects"])
    for subject, facts in expected["subjects"].items():
        partition = broker.subjects[subject]
        assert (partition.start, partition.visible) == (facts["start"], facts["end"])
        assert {group.name for group in partition.groups.values()} == set(facts["groups"])
        for group_name, wanted in facts["groups"].items():
            found = position(partition.groups[group_name])
            if wanted["broadcast"]:
                # Pulls of a broadcast group are not logged: unacked rows count as returned, or as not yet delivered.
                assert undone(found, facts["end"]) == undone(wanted, facts["end"])
            else:
                assert found == wanted
        windows = {
            f"{producer:016x}": window.last
            for producer in broker.producers.ids()
            if (window := broker.producers.window(producer, partition.id)) is not None
        }
        assert windows == facts["producers"]
    broker.stop()


def undone(group: dict[str, Any], end: int) -> set[int]:
    """The sequences that are not done for a group."""
    pieces = [*group["returned"], *(piece for held in group["held"].values() for piece in held)]
    return {*range(group["next"], end), *(sequence for start, stop, _ in pieces for sequence in range(start, stop))}


async def test_a_client_reads_every_message_as_sent(expected: dict[str, Any], root: Path):
    config = msgspec.structs.replace(TEST_CONFIG, retention_seconds=None)
    async with EmbeddedBroker(root, config=config) as broker, broker.connect() as client:
        for subject, facts in expected["subjects"].items():
            async with client.reader(subject, start="earliest") as reader:
                messages = await reader.fetch(100_000, wait=0)
            assert [_row(message) for message in messages] == facts["rows"]


def _row(message: plait.Message) -> dict[str, Any]:
    sent = message.send_time
    return {
        "sequence": message.sequence,
        "id": str(message.message_id),
        "body": message.body.hex(),
        "key": message.key,
        "tags": message.tags,
        "headers": message.headers,
        "send_time": None if sent is None else round(sent.timestamp() * 1_000_000),
        "store_time": round(message.store_time.timestamp() * 1_000_000),
        "epoch": message.epoch,
    }


def test_messages_can_be_appended_to_an_old_directory(expected: dict[str, Any], root: Path):
    for turn in range(2):
        broker = opened(root, expected)
        broker.start()
        for subject, facts in expected["subjects"].items():
            assert broker.subjects[subject].visible == facts["end"] + turn
            append(broker, subject, turn + 1)
        broker.stop()


def append(broker: Broker, subject: str, number: int) -> None:
    """Append a row of a new producer."""
    partition = broker.subjects[subject]
    frame = build_frame([b"new"], producer=0xFF00 + partition.id, first=number, previous=number - 1)
    answers: list[Any] = []
    broker.submit(partition, FrameView(frame.tobytes()), lambda *answer: answers.append(answer))
    broker.turn.commit()
    assert answers == [(partition.visible - 1, None)]


def test_every_golden_directory_has_a_maker():
    assert set(NAMES) == set(DIRECTORIES)


@pytest.mark.parametrize("kind", sorted(DIRECTORIES))
def test_this_version_writes_directories_with_the_same_content(kind: str, tmp_path: Path):
    expected = json.loads((DIRECTORY / f"{kind}.json").read_text())
    assert json.loads(json.dumps(DIRECTORIES[kind](Writer(tmp_path)))) == expected
