"""Full and broken disks: clients get a clear error, and every acknowledged message is stored."""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
from pathlib import Path

import msgspec
import pytest
from crc32c import crc32c

import plait
from plait.clock import ManualClock
from plait.doctor.examine import in_use
from plait.errors import DataDirError, DiskFull, PlaitError, StorageFailed
from plait.limits import FRAME_SIZE_MAX, MIB
from plait.server import Server
from plait.storage.disk import RealDisk
from plait.testing.simulated_disk import Operation, SimulatedDisk
from plait.wire import messages as m
from tests.server.conftest import Serve
from tests.server.raw import Raw

pytestmark = pytest.mark.usefixtures("_quiet")


@pytest.fixture
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Hide the log of failing servers."""
    caplog.set_level(logging.CRITICAL + 1, "plait")


async def failure_of(server: Server) -> StorageFailed:
    assert server.failed is not None
    return await asyncio.wait_for(asyncio.shield(server.failed), 60)


async def bodies_of(server: Server, subject: str) -> list[bytes]:
    async with plait.connect(server.address) as client, client.reader(subject, start="earliest") as reader:
        return [message.body for message in await reader.fetch(100_000, wait=0)]


# --- a full disk ---------------------------------------------------------------------------------


async def test_a_full_disk_refuses_sends_serves_readers_and_recovers(serve: Serve):
    disk = SimulatedDisk(capacity=6 * MIB)
    server = await serve(disk, message_segment_size=2 * MIB, action_segment_size=1 * MIB, disk_used_max=1.0)
    async with plait.connect(server.address) as client, client.consumer("orders", group="g") as consumer:
        answers = await asyncio.gather(
            *(client.send("orders", bytes(100_000)) for _ in range(100)), return_exceptions=True
        )
        refusals = {str(answer) for answer in answers if isinstance(answer, BaseException)}
        [refusal] = refusals
        assert refusal.startswith("the disk is full; nothing was stored; delete subjects,")
        stored = sum(isinstance(answer, plait.Receipt) for answer in answers)
        assert 20 < stored < 100
        # Stored messages can be consumed and acked: the action log has reserved space.
        taken = 0
        while taken < stored:
            batch = await consumer.fetch(1000)
            taken += len(batch)
            await batch.ack()
        assert taken == stored
        with pytest.raises(DiskFull):
            await client.send("orders", bytes(1_000_000))
        disk.capacity = 20 * MIB
        receipt = await client.send("orders", b"room again")
        assert receipt.sequence == stored
        assert [message.body for message in await consumer.fetch(10)] == [b"room again"]


async def test_a_watermark_refuses_sends_until_there_is_space_again(serve: Serve):
    disk = SimulatedDisk(capacity=20 * MIB)
    server = await serve(disk, disk_used_max=0.5, disk_free_min=1 * MIB)
    async with plait.connect(server.address) as client:
        await client.send("orders", b"a")
        disk.open("ballast", create=True).allocate(4 * MIB)
        used = disk.capacity - disk.space()[0]
        disk.capacity = used * 3 // 2
        server.broker_host.tick()
        with pytest.raises(DiskFull, match=r"% full \(watermark 50%\)"):
            await client.send("orders", b"b")
        disk.capacity = used + 1000
        server.broker_host.tick()
        with pytest.raises(DiskFull, match=r"MiB of disk are free \(minimum 1 MiB\)"):
            await client.send("orders", b"b")
        with pytest.raises(DiskFull):
            await client.send("another", b"b")
        assert "another" not in server.broker.subjects
        disk.capacity = 20 * MIB
        server.broker_host.tick()
        assert (await client.send("orders", b"c")).sequence == 1
    assert await bodies_of(server, "orders") == [b"a", b"c"]


async def test_progress_that_cannot_be_recorded_is_not_acknowledged(serve: Serve):
    """The action log and the disk are full: an ack waits; listings and readers do not."""
    disk = SimulatedDisk(capacity=64 * MIB)
    server = await serve(disk, message_segment_size=4 * MIB, action_segment_size=20_000, disk_used_max=1.0)
    async with Raw(server, "raw") as raw:
        await raw.store("orders", *[b"x"] * 2000)
        session = await raw.attach("orders")
        await raw.ask(m.PullRequest(session, 2000, MIB, 0.0))
        disk.capacity = 64 * MIB - disk.space()[0]
        acked = 0
        while not server.broker.turn.stalled:
            acking = raw.request(m.AckRequest(session, [(n, n + 1, 1) for n in range(acked, acked + 100, 2)]))
            # The loop turn of the ack has ended when the second reply arrives.
            await raw.ask(m.HeartbeatRequest())
            beating = raw.request(m.HeartbeatRequest())
            answers = [(await raw.next()).correlation]
            while answers[-1] != beating:
                answers.append((await raw.next()).correlation)
            assert (acking in answers) != server.broker.turn.stalled
            acked += 100
        assert (await raw.ask(m.ReadRequest("orders", "earliest", 5, 1000, 0.0))).next == 5
        assert (await raw.ask(m.AdminRequest("subject.list"))).result
        with pytest.raises(DiskFull, match="cannot record progress"):
            await raw.ask(m.PullRequest(session, 1, 1, 0.0))
        with pytest.raises(DiskFull):
            await raw.ask(m.AckRequest(session, [(1, 2, 1)]))
        disk.capacity = 64 * MIB
        server.broker_host.tick()
        assert (await raw.answer(acking)).message == m.DoneReply()
        assert (await raw.ask(m.AckRequest(session, [(1, 2, 1)]))) == m.DoneReply()


async def test_a_server_that_stops_on_a_full_disk_releases_all_resources(tmp_path: Path):
    class Full(RealDisk):
        def open(self, path: str, *, create: bool = False):  # type: ignore[no-untyped-def]
            if path.startswith("checkpoints/") and self.full:
                raise OSError(errno.ENOSPC, "no room", path)
            return super().open(path, create=create)

        full = False

    disk = Full(tmp_path)
    server = Server(disk, plait_config(), port=0)
    await server.start()
    async with plait.connect(server.address) as client:
        await client.send("orders", b"a")
    disk.full = True
    await server.stop()
    again = Server(RealDisk(tmp_path), plait_config(), port=0)
    report = await again.start()
    try:
        assert not report.clean
        assert await bodies_of(again, "orders") == [b"a"]
    finally:
        await again.stop()


def plait_config(**settings: object) -> plait.broker.BrokerConfig:
    from plait.broker import BrokerConfig

    # The machine's disk may be full.
    sizes = {"message_segment_size": FRAME_SIZE_MAX, "action_segment_size": MIB}
    return BrokerConfig(**sizes, disk_free_min=0, disk_used_max=1.0, **settings)  # type: ignore[arg-type]


# --- a broken disk -------------------------------------------------------------------------------


@pytest.mark.parametrize("flush", ["async", "sync"])
@pytest.mark.parametrize(
    ("operation", "path"),
    [("write", "message/*"), ("sync", "message/*"), ("sync", "action/*")],
)
async def test_a_log_that_cannot_be_written_or_synced_stops_the_server_and_a_restart_recovers(
    serve: Serve, flush: str, operation: Operation, path: str
):
    disk = SimulatedDisk()
    server = await serve(disk, flush=flush, flush_seconds=0.01)
    acknowledged: list[bytes] = []

    async def send_all(client: plait.Client, first: int, end: int) -> None:
        for number in range(first, end):
            body = b"%d" % number
            await client.send("orders", body)
            acknowledged.append(body)

    limits = plait.ClientLimits(send_seconds=0.2, request_seconds=0.2)
    async with plait.connect(server.address) as patient:
        await send_all(patient, 0, 50)
    async with plait.connect(server.address, limits=limits) as client:
        consuming = asyncio.create_task(ack_all(client))
        disk.fail(operation, path=path, times=None)
        with pytest.raises(PlaitError):
            await send_all(client, 50, 1000)
        failure = await failure_of(server)
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
    assert "Input/output error" in failure.message
    assert not server.connections
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(server.host, server.port)
    count = len(acknowledged)
    with pytest.raises(PlaitError):
        async with plait.connect(server.address, limits=plait.ClientLimits(request_seconds=0.1)) as late:
            await late.send("orders", b"late")
    await server.stop()
    # Read the medium: after a failed sync the page cache may differ from it.
    found = disk.after_crash(keep="none") if flush == "sync" else disk.copy()
    again = await serve(found, flush=flush)
    bodies = await bodies_of(again, "orders")
    assert bodies[:count] == acknowledged
    assert len(set(bodies)) == len(bodies)
    assert set(bodies) <= {b"%d" % number for number in range(1000)}


async def ack_all(client: plait.Client) -> None:
    async with client.consumer("orders", group="g") as consumer:
        while True:
            batch = await consumer.fetch(100)
            await batch.ack()


async def test_the_number_of_a_subject_is_not_sent_before_it_is_stored(serve: Serve):
    """After a crash another subject would get the number, and the messages would be stored there."""
    disk = SimulatedDisk()
    server = await serve(disk)
    async with Raw(server, "raw") as raw:
        known = await raw.route("known")
        disk.fail("write", path="message/*", times=None)
        raw.request(m.PartitionNumberRequest("new"))
        # The second request also waits for the commit.
        raw.request(m.PartitionNumberRequest("new"))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await raw.next()
    again = await serve(disk.copy())
    # The failed write may have stored the first of the two frames that define the subject, which is enough.
    assert [name for name in again.broker.subjects if name != "new"] == ["known"]
    async with Raw(again, "raw") as raw:
        assert len({await raw.route(name) for name in ("other", "known", "new")}) == 3
        assert await raw.route("known") == known


async def test_a_defect_in_a_background_job_stops_the_server(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    server = await serve(flush_seconds=0.01)

    def broken() -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(server.broker.turn, "begin_sync", broken)
    async with Raw(server, "raw") as raw:
        raw.request(m.PartitionNumberRequest("orders"))
        assert await raw.ending() is None
        assert "defect" in (await failure_of(server)).message
        assert not server.connections


async def test_an_action_log_that_cannot_be_written_stops_the_server_before_an_ack_is_acknowledged(serve: Serve):
    disk = SimulatedDisk()
    clock = ManualClock()
    server = await serve(disk, clock=clock)
    async with Raw(server, "raw") as raw:
        await raw.store("orders", b"a")
        session = await raw.attach("orders")
        await raw.ask(m.PullRequest(session, 1, 1, 0.0))
        disk.fail("write", path="action/*", times=None)
        raw.request(m.AckRequest(session, [(0, 1, 1)]))
        assert await raw.ending() is None
    assert isinstance(await failure_of(server), StorageFailed)
    again = await serve(disk.copy(), clock=clock)
    # The message is redelivered after the time in which the consumer may come back.
    clock.advance(10.0)
    again.broker_host.tick()
    async with Raw(again, "other") as raw:
        session = await raw.attach("orders", client="other")
        assert (await raw.ask(m.PullRequest(session, 1, 1, 0.0))).ranges == [(0, 1, 2)]


# --- the data directory --------------------------------------------------------------------------


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "LOCK"
    }


async def test_a_directory_has_one_server_at_a_time(tmp_path: Path):
    first = Server(RealDisk(tmp_path), plait_config(), port=0)
    await first.start()
    second = Server(RealDisk(tmp_path), plait_config(), port=0)
    with pytest.raises(DataDirError, match="in use by another plait process"):
        await second.start()
    async with plait.connect(first.address) as client:
        await client.send("orders", b"a")
    await first.stop()
    third = Server(RealDisk(tmp_path), plait_config(), port=0)
    report = await third.start()
    assert report.clean
    assert await bodies_of(third, "orders") == [b"a"]
    await third.stop()


async def test_a_taken_port_leaves_the_directory_free_for_the_next_start(tmp_path: Path):
    holder = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = holder.sockets[0].getsockname()[1]
    server = Server(RealDisk(tmp_path), plait_config(), port=port)
    with pytest.raises(OSError, match=r"address already in use|Address already in use"):
        await server.start()
    holder.close()
    again = Server(RealDisk(tmp_path), plait_config(), port=0)
    await again.start()
    await again.stop()


@pytest.mark.parametrize("change", [1, -1])
async def test_another_format_version_is_refused_and_left_unchanged(change: int, tmp_path: Path):
    server = Server(RealDisk(tmp_path), plait_config(), port=0)
    await server.start()
    async with plait.connect(server.address) as client:
        await client.send("orders", b"a")
    await server.stop()
    manifest = max((tmp_path / "checkpoints").glob("manifest-*"))
    body = msgspec.msgpack.decode(manifest.read_bytes()[8:])
    body["version"] += change
    encoded = msgspec.msgpack.encode(body)
    manifest.write_bytes(b"PLCK" + crc32c(encoded).to_bytes(4, "little") + encoded)
    before = contents(tmp_path)
    refused = Server(RealDisk(tmp_path), plait_config(), port=0)
    with pytest.raises(DataDirError, match=f"format version {body['version']}, this Plait reads only version"):
        await refused.start()
    assert contents(tmp_path) == before


# --- changes of the data directory by other processes --------------------------------------------


async def test_sends_to_a_deleted_data_directory_are_not_acknowledged(serve: Serve, tmp_path: Path):
    data = tmp_path / "data"
    server = await serve(RealDisk(data), flush="sync", message_segment_size=FRAME_SIZE_MAX)
    async with Raw(server, "raw") as raw:
        assert await raw.store("orders", b"a") == 0
        shutil.rmtree(data)
        with pytest.raises((PlaitError, OSError, asyncio.IncompleteReadError)):
            await raw.store("orders", b"b", first=2, previous=1)
    assert "deleted while the server ran" in (await failure_of(server)).message


async def test_a_data_directory_that_was_moved_away_is_noticed(serve: Serve, tmp_path: Path):
    server = await serve(RealDisk(tmp_path / "data"), message_segment_size=FRAME_SIZE_MAX)
    server.broker_host.tick()
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    server.broker_host.tick()
    failure = await failure_of(server)
    assert f"data directory {tmp_path / 'data'} was removed or replaced while the server ran" in failure.message


async def test_without_its_lock_file_a_data_directory_takes_no_second_server(serve: Serve, tmp_path: Path):
    await serve(RealDisk(tmp_path), message_segment_size=FRAME_SIZE_MAX)
    (tmp_path / "LOCK").unlink()
    assert in_use(tmp_path)
    with pytest.raises(DataDirError, match="in use by another plait process"):
        await serve(RealDisk(tmp_path), message_segment_size=FRAME_SIZE_MAX)


async def test_failing_checkpoints_are_logged_once_and_when_they_succeed_again(
    serve: Serve, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "plait.server")
    server = await serve()
    full = OSError(errno.ENOSPC, "No space left on device")
    for error in (full, full, None, None):
        server.broker_host.upkeep._checkpoint_ended(error)
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert "a checkpoint cannot be written: [Errno 28] No space left" in caplog.text
