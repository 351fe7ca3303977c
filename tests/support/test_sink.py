"""The sink refuses low epochs and finds violations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sink import Sink, SinkClient


@pytest.fixture
def sink(tmp_path: Path) -> Sink:
    return Sink(tmp_path / "sink")


def test_an_epoch_below_the_highest_is_refused(sink: Sink):
    assert sink.begin("a", 7, 1)
    assert sink.begin("b", 7, 2)
    assert not sink.begin("a", 7, 1)
    assert sink.begin("a", 8, 1)
    assert (sink.refused, sink.handovers, sink.violations) == (1, 1, [])


def test_two_owners_of_one_epoch_are_a_violation(sink: Sink):
    sink.begin("a", 7, 1)
    sink.begin("b", 7, 1)
    assert sink.violations == ["b and a both have epoch 1 of logical partition 7"]


def test_a_write_after_a_later_message_is_a_violation(sink: Sink):
    for number in (0, 2, 2, 1):
        sink.write("a", "k", "p", number)
    sink.write("a", "other", "p", 0)
    assert sink.violations == ["a wrote p:1 of k after p:2"]
    assert sink.repeated == 2


async def test_handlers_ask_through_a_socket(sink: Sink):
    async with sink:
        client = SinkClient(str(sink.path), "a")
        begun = await client.begin(7, 2)
        written = await client.write(7, 2, "k", "p", 5)
        late = await client.write(7, 1, "k", "p", 6)
        await client.close()
    assert (begun.accepted, written.accepted, late.accepted) == (True, True, False)
    assert begun.time <= written.time <= late.time
    assert sink.written == {("p", 5)}
