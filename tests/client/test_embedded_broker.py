"""``plait.testing``: the embedded broker for users' tests, and its pytest fixtures."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import plait
import plait.sync
from plait.testing import EmbeddedBroker, ManualClock
from tests.client.support import until


async def test_an_embedded_broker_runs_on_the_loop_of_the_test() -> None:
    async with EmbeddedBroker() as broker, broker.connect(client_id="me") as client:
        assert (await client.send("s", b"")).sequence == 0
        assert broker.data.is_dir()
        assert client.client_id == "me"
    assert not broker.data.exists()


def test_an_embedded_broker_runs_in_its_own_thread() -> None:
    with EmbeddedBroker() as broker:
        with plait.sync.connect(broker.address) as client:
            assert client.send("s", b"").sequence == 0
        data = broker.data
        assert data.is_dir()
    assert not data.exists()


async def test_a_given_directory_is_not_removed(tmp_path: Path) -> None:
    for sequence in range(2):
        async with EmbeddedBroker(tmp_path / "data") as broker, broker.connect() as client:
            assert (await client.send("s", b"")).sequence == sequence
    assert (tmp_path / "data").is_dir()


async def test_relative_times_use_the_clock_of_the_broker(timed_broker: EmbeddedBroker) -> None:
    async with timed_broker.connect() as client:
        await client.send("s", b"now")
        await client.send("s", b"soon", delay="5m")
        await client.send("s", b"later", delay="1h")
        assert len(await client.admin.scheduled("s", end="10m")) == 1
        assert [count.count for count in await client.admin.schedule_counts(start="10m")] == [1]
        await timed_broker.advance("4m")
        await client.send("s", b"then")
        async with client.reader("s", start="-2m") as reader:
            assert [message.body for message in await reader.fetch(10, wait=20)] == [b"then"]
        async with client.consumer("s", group="g", start="-2m") as consumer:
            [message] = await consumer.fetch(10, wait=20)
            assert message.body == b"then"
        assert [each.position for each in (await client.admin.rewind_group("s", "g", "-2m")).partitions] == [1]


async def test_every_client_of_this_process_uses_the_manual_clock() -> None:
    handled: list[bytes] = []
    async with EmbeddedBroker(clock=ManualClock()) as broker:
        app = plait.App(broker.address, group="g")

        @app.subscriber("s")
        async def handle(message: plait.Message) -> None:
            handled.append(message.body)
            if message.body == b"first":
                await app.send("s", b"second", delay="5m")
            else:
                app.stop()

        async with plait.connect(broker.address) as client:
            receipt = await client.send("s", b"first", delay="1h")
            assert receipt.deliver_at is not None
            assert receipt.deliver_at.timestamp() * 1_000_000 == broker.clock.now() + 3_600_000_000
            running = asyncio.create_task(app.run())
            await broker.advance("1h")
            await until(lambda: handled and broker.server.broker.schedules.count)
            await broker.advance("5m")
            await asyncio.wait_for(running, 60)
        assert handled == [b"first", b"second"]


def test_blocking_delays_use_the_manual_clock() -> None:
    with EmbeddedBroker(clock=ManualClock()) as broker, broker.connect(client_id="me") as client:
        assert client.client_id == "me"
        client.send("s", b"later", delay="1h")
        client.post("s", b"latest", delay="2h").result()
        with client.consumer("s", group="g") as consumer:
            assert len(consumer.fetch(10, wait=0)) == 0
            broker.advance("1h")
            assert [message.body for message in consumer.fetch(10, wait=20)] == [b"later"]
    with EmbeddedBroker(clock=ManualClock()) as broker, plait.sync.connect(broker.address) as client:
        client.send("s", b"later", delay="1h")


async def test_the_clock_of_a_stopped_broker_is_forgotten() -> None:
    async with EmbeddedBroker(clock=ManualClock()) as broker:
        address = broker.address
        assert plait.connect(address)._consumers.clock is broker.clock
    assert plait.connect(address)._consumers.clock is not broker.clock


async def test_a_restart_keeps_address_and_messages() -> None:
    async with EmbeddedBroker() as broker, broker.connect() as client:
        address = broker.address
        await client.send("s", b"")
        await broker.restart()
        assert broker.address == address
        report = broker.server.report
        assert report is not None
        assert report.clean
        assert (await client.send("s", b"")).sequence == 1


async def test_a_start_recovers_from_a_kill() -> None:
    async with EmbeddedBroker() as broker, broker.connect() as client:
        await client.send("s", b"")
        epoch = broker.server.broker.turn.epoch
        await broker.kill()
        with pytest.raises(plait.Closed, match="is down"):
            _ = broker.server
        await broker.kill()
        await broker.start()
        await broker.start()
        report = broker.server.report
        assert report is not None
        assert not report.clean
        assert broker.server.broker.turn.epoch > epoch
        assert (await client.send("s", b"")).sequence == 1


def test_the_blocking_form_restarts_and_crashes_too() -> None:
    with EmbeddedBroker(clock=ManualClock()) as broker, plait.sync.connect(broker.address) as client:
        for sequence, disturb in enumerate((broker.restart, broker.kill, lambda: broker.advance("1h"), broker.stop)):
            assert client.send("s", b"").sequence == sequence
            disturb()
            broker.start()
        assert client.send("s", b"").sequence == 4


async def test_a_suspended_pull_ends_by_virtual_time() -> None:
    async with (
        EmbeddedBroker(clock=ManualClock()) as broker,
        broker.connect() as client,
        client.consumer("s", group="g"),
    ):
        assert (await client.admin.group("s", "g")).online == 1
        [waiting] = broker.server.broker.subjects["s"].groups["g"].waiters
        await broker.advance(19)
        assert waiting.deadline
        await broker.advance(2)
        assert not waiting.deadline


async def test_the_machine_clock_cannot_be_advanced() -> None:
    async with EmbeddedBroker() as broker:
        with pytest.raises(plait.InvalidArgument, match="ManualClock"):
            await broker.advance(1)


def test_a_broker_that_is_not_started_refuses_calls() -> None:
    with pytest.raises(plait.Closed, match="not been started"):
        _ = EmbeddedBroker().address


def test_the_fixtures_come_with_the_installed_package() -> None:
    [entry] = [entry for entry in entry_points(group="pytest11") if entry.name == "plait"]
    assert entry.load().plait_broker is not None


def test_the_plugin_imports_no_broker_until_a_fixture_needs_it() -> None:
    program = "import sys, plait.testing.pytest_plugin; sys.exit('plait.server' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
