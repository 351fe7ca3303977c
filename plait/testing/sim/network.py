"""The network between simulated processes: who listens where, how long bytes take, and who is cut off from whom.

Hosts are names; "127.0.0.1", "localhost" and "::1" are one host that all processes share, so what only binds to
loopback can be reached from every process. Cuts are between processes, each direction by itself.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from plait.testing.sim.transport import Endpoint, Pipe

if TYPE_CHECKING:
    from plait.testing.sim.process import Process
    from plait.testing.sim.sim_loop import SimLoop
    from plait.testing.sim.simulation import Simulation

LOOPBACK = ("127.0.0.1", "localhost", "::1")
#: What a bind to port 0 gets.
FIRST_FREE_PORT = 20_000
#: Bytes of one connection and direction that are on their way or not read.
WINDOWS = (16 * 1024, 64 * 1024, 256 * 1024, 1024 * 1024)
#: A connection that is asked for and not answered is asked for again after this, then after twice that, ...
DIAL_AGAIN_SECONDS = 1.0

Address = tuple[str, int]
Factory = Callable[[], asyncio.BaseProtocol]


class Network:
    """Made by ``Simulation``."""

    def __init__(self, simulation: Simulation, rng: random.Random) -> None:
        self.simulation = simulation
        self.random = rng
        #: Seconds that bytes take, at least and at most...
        self.latency_seconds = (0.00005, 0.0005)
        #: ...but sometimes up to this.
        self.spike_seconds = 0.05
        self.spike_odds = 0.01
        #: How often what is there to read comes in two pieces.
        self.cut_odds = 0.1
        #: How often a connection ends with a reset where an end of stream would do.
        self.reset_odds = 0.1
        #: How long after a cut is mended TCP may take to send again.
        self.retry_seconds = 1.0
        #: How long TCP sends again before it gives a connection up.
        self.give_up_seconds = (15.0, 30.0)
        self._listeners: dict[Address, SimListener] = {}
        #: Who listened there last: the machine that answers or not when nobody does.
        self._owners: dict[Address, Process] = {}
        self._endpoints: dict[Endpoint, Endpoint] = {}
        self._cuts: dict[tuple[Process, Process], None] = {}
        #: What came to a cut; their ends may be gone.
        self._holding: dict[Pipe, None] = {}
        self._next_port = FIRST_FREE_PORT

    # --- chance ---------------------------------------------------------------------------------

    def latency(self) -> float:
        """How long the next bytes take."""
        low, high = self.latency_seconds
        if self.random.random() < self.spike_odds:
            high = max(high, self.spike_seconds)
        return self.random.uniform(low, high)

    def chunk(self, size: int) -> int:
        """How much of so many bytes comes at once."""
        if size > 1 and self.random.random() < self.cut_odds:
            return self.random.randint(1, size)
        return size

    def retry_pause(self) -> float:
        """Until TCP sends again."""
        return self.random.uniform(0.0, self.retry_seconds)

    def give_up_pause(self) -> float:
        """Until TCP gives up."""
        return self.random.uniform(*self.give_up_seconds)

    # --- cuts -----------------------------------------------------------------------------------

    def cut(self, source: Process, target: Process, *, both: bool = True) -> None:
        """Nothing gets from the one to the other any more; ``both``: and nothing back."""
        self.simulation.log(source.name, f"is cut off from {target.name}" + ("" if both else ", one way"))
        self._cuts[source, target] = None
        if both:
            self._cuts[target, source] = None

    def mend(self, one: Process, other: Process) -> None:
        """Whatever was cut between the two is whole."""
        if self.is_cut(one, other) or self.is_cut(other, one):
            self.simulation.log(one.name, f"reaches {other.name} again")
            self._cuts.pop((one, other), None)
            self._cuts.pop((other, one), None)
            self._healed()

    def heal(self) -> None:
        """No cuts."""
        if self._cuts:
            self.simulation.log("network", "is whole")
            self._cuts.clear()
            self._healed()

    def is_cut(self, source: Process, target: Process) -> bool:
        """Whether nothing gets there."""
        return bool(self._cuts) and (source, target) in self._cuts

    def holds(self, pipe: Pipe) -> None:
        """It has something that did not get through."""
        self._holding[pipe] = None

    def _healed(self) -> None:
        for pipe in self._holding:
            pipe.retry()
        self._holding.clear()
        for one, other in list(self._endpoints.items()):
            if not (self.is_cut(one.process, other.process) or self.is_cut(other.process, one.process)):
                one.healed()

    # --- listening and dialling -----------------------------------------------------------------

    def listen(self, loop: SimLoop, factory: Factory, host: str, port: int) -> SimListener:
        """A server on that address."""
        if not port:
            port, self._next_port = self._next_port, self._next_port + 1
        address = (_canonical(host), port)
        if address in self._listeners:
            raise OSError(errno.EADDRINUSE, f"error while attempting to bind on address {address}: in use")
        listener = self._listeners[address] = SimListener(self, loop, factory, address)
        self._owners[address] = loop.process
        return listener

    def unlisten(self, listener: SimListener) -> None:
        """Its address is free."""
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]

    async def connect(
        self, loop: SimLoop, factory: Factory, host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """A connection from that loop; ``OSError`` when there is none to be had."""
        dialling = _Dialling(self, loop, factory, (_canonical(host), port))
        try:
            return await dialling.future
        except BaseException:
            dialling.abandon()
            raise

    def listener_at(self, address: Address) -> SimListener | None:
        return self._listeners.get(address)

    def owner_of(self, address: Address) -> Process | None:
        """The process whose machine has the address."""
        return self._owners.get(address)

    def join(self, near: SimLoop, listener: SimListener) -> Endpoint:
        """Make both ends of a connection; the near one. The far one waits to be accepted."""
        port, self._next_port = self._next_port, self._next_port + 1
        here = ("127.0.0.1", port)
        one = Endpoint(self, near, here, listener.address)
        other = Endpoint(self, listener.loop, listener.address, here)
        window = self.random.choice(WINDOWS)
        one.out = other.into = Pipe(self, one, other, window)
        other.out = one.into = Pipe(self, other, one, window)
        self._endpoints[one] = other
        self._endpoints[other] = one
        listener.loop.call_soon(listener.accept, other)
        return one

    def window_opened(self, reader: Endpoint) -> None:
        """Bytes were read: the other end may send more, once it knows."""
        writer = self._endpoints.get(reader)
        if writer is not None and writer.get_write_buffer_size() and not self.is_cut(reader.process, writer.process):
            self.simulation.call_later(self.latency(), writer.write_room)

    def closed(self, endpoint: Endpoint) -> None:
        """One end is gone."""
        self._endpoints.pop(endpoint, None)

    def _died(self, process: Process, *, silent: bool) -> None:
        """Its sockets go with a process; ``silent``: nobody says so."""
        for listener in list(self._listeners.values()):
            if listener.loop.process is process:
                self.unlisten(listener)
        for endpoint in list(self._endpoints):
            if endpoint.process is process:
                endpoint.vanish(silent=silent)


class SimListener(asyncio.AbstractServer):
    """A server socket."""

    def __init__(self, network: Network, loop: SimLoop, factory: Factory, address: Address) -> None:
        self._network = network
        self.loop = loop
        self.address = address
        self._factory = factory

    @property
    def sockets(self) -> tuple[Any, ...]:
        """As ``asyncio.Server`` has them: what is asked of them is their name."""
        return (_Socket(self.address),)

    def accept(self, endpoint: Endpoint) -> None:
        """The process takes a connection."""
        if not self.is_serving():
            endpoint.abort()
            return
        endpoint.begin(self._factory())

    def is_serving(self) -> bool:
        return self._network.listener_at(self.address) is self

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self.loop

    def close(self) -> None:
        self._network.unlisten(self)

    async def wait_closed(self) -> None:
        """Connections that were made stay."""

    async def start_serving(self) -> None:
        """It does from the beginning."""

    async def serve_forever(self) -> None:
        await self.loop.create_future()


class _Socket:
    def __init__(self, address: Address) -> None:
        self._address = address

    def getsockname(self) -> Address:
        return self._address

    def fileno(self) -> int:
        """No file of this machine."""
        return -1


class _Dialling:
    """One attempt to connect, the repeated questions of TCP included."""

    def __init__(self, network: Network, loop: SimLoop, factory: Factory, address: Address) -> None:
        self._network = network
        self._loop = loop
        self._factory = factory
        self._address = address
        self._pause = DIAL_AGAIN_SECONDS
        self._endpoint: Endpoint | None = None
        self.future: asyncio.Future[tuple[asyncio.Transport, asyncio.BaseProtocol]] = loop.create_future()
        self._ask()

    def _ask(self) -> None:
        if not self.future.done() and not self._loop.dead:
            self._network.simulation.call_later(self._network.latency(), self._asked)

    def _asked(self) -> None:
        network, process = self._network, self._loop.process
        if self.future.done() or self._loop.dead:
            return
        listener = network.listener_at(self._address)
        owner = network.owner_of(self._address) if listener is None else listener.loop.process
        if owner is not None and (
            not owner.powered or network.is_cut(process, owner) or network.is_cut(owner, process)
        ):
            network.simulation.call_later(self._pause, self._ask)
            self._pause *= 2
        elif listener is None:
            error = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            network.simulation.call_later(network.latency(), self._answer, error)
        else:
            self._endpoint = network.join(self._loop, listener)
            network.simulation.call_later(network.latency(), self._answer, None)

    def _answer(self, error: OSError | None) -> None:
        self._loop.call_soon(self._end, error)

    def _end(self, error: OSError | None) -> None:
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
            return
        assert self._endpoint is not None
        protocol = self._factory()
        self._endpoint.begin(protocol)
        self.future.set_result((self._endpoint, protocol))

    def abandon(self) -> None:
        """Nobody waits for it any more: what was made is closed."""
        if self._endpoint is not None:
            self._endpoint.abort()


def _canonical(host: str) -> str:
    return LOOPBACK[0] if host in LOOPBACK else host
