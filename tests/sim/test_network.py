"""The simulated network: asyncio connections, flow control, refusals, cuts, kills and pauses."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator

import pytest

from plait.testing.sim import Process, Simulation

HOST, PORT = "127.0.0.1", 9000


@pytest.fixture
def sim() -> Iterator[Simulation]:
    with Simulation(1) as simulation:
        # Each test sets the odds that matter to it.
        simulation.network.spike_odds = simulation.network.reset_odds = 0.0
        yield simulation


class Taker(asyncio.Protocol):
    """Records every callback."""

    def __init__(self) -> None:
        self.data = b""
        self.pieces = 0
        self.ended = False
        self.lost: list[Exception | None] = []
        self.writing = True
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.pieces += 1

    def eof_received(self) -> bool:
        self.ended = True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)

    def pause_writing(self) -> None:
        self.writing = False

    def resume_writing(self) -> None:
        self.writing = True


class BufferedTaker(asyncio.BufferedProtocol):
    """Reads into its own small buffer."""

    def __init__(self) -> None:
        self.buffer = bytearray(1000)
        self.data = b""

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data += self.buffer[:nbytes]


def listen(process: Process, protocols: list[Taker]) -> asyncio.AbstractServer:
    def factory() -> Taker:
        protocols.append(Taker())
        return protocols[-1]

    task = process.spawn(process.loop().create_server(factory, HOST, PORT))
    process.timeline.run_until(task.done)
    server: asyncio.AbstractServer = task.result()
    return server


def dial(process: Process) -> Taker:
    task = process.spawn(process.loop().create_connection(Taker, HOST, PORT))
    process.timeline.run_until(task.done)
    protocol: Taker = task.result()[1]
    return protocol


@pytest.fixture
def pair(sim: Simulation) -> tuple[Taker, Taker]:
    """The two ends of a connection between the processes "client" and "server"."""
    accepted: list[Taker] = []
    listen(sim.process("server"), accepted)
    client = dial(sim.process("client"))
    sim.run_until(lambda: accepted)
    return client, accepted[0]


def test_bytes_come_in_order_and_whole(sim: Simulation, pair: tuple[Taker, Taker]):
    sim.network.cut_odds = 0.5
    client, server = pair
    sent = b""
    for number in range(200):
        client.transport.write(b"%d," % number)
        sent += b"%d," % number
        sim.run_for(0.0001)
    client.transport.writelines([b"a", bytearray(b"b"), memoryview(b"c")])
    sim.run_for(1.0)
    assert server.data == sent + b"abc"
    assert server.pieces > 20


def test_bytes_arrive_after_the_latency(sim: Simulation, pair: tuple[Taker, Taker]):
    sim.network.latency_seconds = (0.5, 0.6)
    client, server = pair
    client.transport.write(b"x")
    sim.run_for(0.49)
    assert server.data == b""
    sim.run_for(0.12)
    assert server.data == b"x"


def test_a_buffered_protocol_gets_no_more_than_its_buffer_holds(sim: Simulation):
    got: list[BufferedTaker] = []

    def factory() -> BufferedTaker:
        got.append(BufferedTaker())
        return got[-1]

    server = sim.process("server")
    sim.run_until(server.spawn(server.loop().create_server(factory, HOST, PORT)).done)
    client = dial(sim.process("client"))
    body = bytes(range(256)) * 50
    client.transport.write(body)
    sim.run_for(5.0)
    assert got[0].data == body


def test_a_paused_reader_pauses_the_writer(sim: Simulation, pair: tuple[Taker, Taker]):
    client, server = pair
    server.transport.pause_reading()
    client.transport.set_write_buffer_limits(high=100_000, low=50_000)
    written = 0
    while client.writing:
        client.transport.write(bytes(50_000))
        written += 50_000
        sim.run_for(0.1)
        assert written < 5_000_000
    assert client.transport.get_write_buffer_size() > 100_000
    assert server.data == b""
    server.transport.resume_reading()
    sim.run_for(5.0)
    assert client.writing
    assert client.transport.get_write_buffer_size() == 0
    assert len(server.data) == written


def test_close_sends_buffered_bytes_and_ends_both_sides(sim: Simulation, pair: tuple[Taker, Taker]):
    client, server = pair
    client.transport.write(bytes(3_000_000))
    client.transport.close()
    assert client.transport.is_closing()
    client.transport.write(b"too late")
    sim.run_for(5.0)
    assert len(server.data) == 3_000_000
    assert server.ended
    assert client.lost == server.lost == [None]


def test_abort_drops_buffered_bytes(sim: Simulation, pair: tuple[Taker, Taker]):
    client, server = pair
    server.transport.pause_reading()
    client.transport.write(bytes(3_000_000))
    client.transport.abort()
    server.transport.resume_reading()
    sim.run_for(5.0)
    assert client.lost == server.lost == [None]
    assert len(server.data) < 3_000_000


def test_a_half_closed_connection_still_receives(sim: Simulation, pair: tuple[Taker, Taker]):
    client, server = pair
    server.eof_received = lambda: True  # type: ignore[method-assign]
    client.transport.write(b"question")
    client.transport.write_eof()
    sim.run_for(1.0)
    server.transport.write(b"answer")
    sim.run_for(1.0)
    assert client.data == b"answer"
    with pytest.raises(RuntimeError):
        client.transport.write(b"more")


def test_closing_with_unread_bytes_resets_the_other_side(sim: Simulation, pair: tuple[Taker, Taker]):
    client, server = pair
    server.transport.pause_reading()
    client.transport.write(b"unread")
    sim.run_for(1.0)
    server.transport.close()
    sim.run_for(1.0)
    [error] = client.lost
    assert isinstance(error, ConnectionResetError)


# --- dialling -----------------------------------------------------------------------------------


def refused(process: Process) -> OSError:
    task = process.spawn(process.loop().create_connection(Taker, HOST, PORT))
    process.timeline.run_until(task.done, seconds=600.0)
    error = task.exception()
    assert isinstance(error, OSError)
    return error


def test_a_closed_listener_refuses_and_its_address_is_free(sim: Simulation, pair: tuple[Taker, Taker]):
    server = sim.process("server")
    with pytest.raises(OSError, match="in use"):
        listen(server, [])
    [listener] = sim.network._listeners.values()
    listener.close()
    assert not listener.is_serving()
    assert refused(sim.process("client")).errno == errno.ECONNREFUSED
    assert listen(server, []).is_serving()


def test_port_0_is_any_free_port(sim: Simulation):
    server = sim.process("server")
    tasks = [server.spawn(server.loop().create_server(Taker, HOST, 0)) for _ in range(2)]
    sim.run_for(1.0)
    first, second = (task.result().sockets[0].getsockname()[1] for task in tasks)
    assert first != second


def test_a_connect_during_a_cut_succeeds_after_it(sim: Simulation):
    client, server = sim.process("client"), sim.process("server")
    accepted: list[Taker] = []
    listen(server, accepted)
    sim.network.cut(client, server)
    task = client.spawn(client.loop().create_connection(Taker, HOST, PORT))
    sim.run_for(10.0)
    assert not task.done()
    sim.network.heal()
    sim.run_for(20.0)
    assert task.done()
    assert len(accepted) == 1


def test_a_cancelled_connect_leaves_no_connection(sim: Simulation):
    client, server = sim.process("client"), sim.process("server")
    accepted: list[Taker] = []
    listen(server, accepted)
    sim.network.latency_seconds = (0.5, 0.5)

    async def hasty() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.7):
                await asyncio.get_running_loop().create_connection(Taker, HOST, PORT)

    sim.run_until(client.start(hasty()).done)
    sim.run_for(5.0)
    assert [taker.lost for taker in accepted] == [[None]]
    assert sim.network._endpoints == {}


# --- cuts ---------------------------------------------------------------------------------------


def test_bytes_sent_during_a_short_cut_arrive_after_it(sim: Simulation, pair: tuple[Taker, Taker]):
    client, server = pair
    sim.network.cut(sim.process("client"), sim.process("server"))
    client.transport.write(b"one")
    sim.run_for(2.0)
    client.transport.write(b"two")
    sim.run_for(3.0)
    assert server.data == b""
    sim.network.mend(sim.process("server"), sim.process("client"))
    sim.run_for(3.0)
    assert server.data == b"onetwo"
    assert client.lost == []


def test_a_one_way_cut_leaves_the_other_direction_open(sim: Simulation, pair: tuple[Taker, Taker]):
    client, server = pair
    sim.network.cut(sim.process("client"), sim.process("server"), both=False)
    client.transport.write(b"up")
    server.transport.write(b"down")
    sim.run_for(5.0)
    assert (server.data, client.data) == (b"", b"down")


@pytest.mark.parametrize("both", [True, False])
def test_a_long_cut_times_out_the_sender_and_is_silent_for_the_receiver(
    sim: Simulation, pair: tuple[Taker, Taker], both: bool
):
    client, server = pair
    sim.network.cut(sim.process("client"), sim.process("server"), both=both)
    client.transport.write(b"x")
    sim.run_for(40.0)
    [error] = client.lost
    assert isinstance(error, TimeoutError)
    assert server.lost == []
    sim.network.heal()
    sim.run_for(10.0)
    assert server.lost == []
    server.transport.write(b"hello?")
    sim.run_for(10.0)
    assert isinstance(server.lost[0], ConnectionResetError)


def test_bytes_without_a_confirmation_time_out_too(sim: Simulation, pair: tuple[Taker, Taker]):
    client, server = pair
    sim.network.cut(sim.process("server"), sim.process("client"), both=False)
    client.transport.write(b"x")
    sim.run_for(1.0)
    assert server.data == b"x"
    sim.run_for(40.0)
    assert isinstance(client.lost[0], TimeoutError)


# --- processes ----------------------------------------------------------------------------------


def test_the_connections_of_a_killed_process_end_after_its_sent_bytes(sim: Simulation, pair: tuple[Taker, Taker]):
    client, server = pair
    server.transport.write(b"last words")
    sim.process("server").kill()
    sim.run_for(1.0)
    assert client.data == b"last words"
    assert client.lost == [None]
    assert server.lost == []
    assert refused(sim.process("client")).errno == errno.ECONNREFUSED


def test_a_kill_during_a_cut_is_noticed_after_the_cut(sim: Simulation, pair: tuple[Taker, Taker]):
    client, _ = pair
    sim.network.cut(sim.process("client"), sim.process("server"))
    sim.process("server").kill()
    sim.run_for(10.0)
    assert client.lost == []
    sim.network.heal()
    sim.run_for(2.0)
    assert client.lost == [None]


def test_a_machine_without_power_is_silent_until_it_restarts(sim: Simulation, pair: tuple[Taker, Taker]):
    client, _ = pair
    server = sim.process("server")
    server.kill(power_loss=True)
    client.transport.write(b"x")
    sim.run_for(10.0)
    assert client.lost == []
    server.start(sim.sleep(100.0))
    client.transport.write(b"y")
    sim.run_for(1.0)
    assert isinstance(client.lost[0], ConnectionResetError)


def test_the_kernel_of_a_paused_process_accepts_connections_and_bytes(sim: Simulation):
    server = sim.process("server")
    accepted: list[Taker] = []
    listen(server, accepted)
    server.pause()
    client = dial(sim.process("client"))
    client.transport.write(b"during the pause")
    sim.run_for(10.0)
    assert accepted == []
    server.resume()
    sim.run_for(1.0)
    assert accepted[0].data == b"during the pause"


def test_connections_that_a_killed_process_had_not_accepted_end(sim: Simulation):
    server = sim.process("server")
    listen(server, [])
    server.pause()
    client = dial(sim.process("client"))
    sim.run_for(1.0)
    server.kill()
    sim.run_for(1.0)
    assert client.lost == [None]
