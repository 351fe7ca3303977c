"""The network between simulated processes: listeners, latency and cuts.

A host is any name. "127.0.0.1", "localhost" and "::1" mean one host that all processes share, so every process can
reach a server that binds to loopback only. A cut stops the bytes from one process to another process.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable
from typing import Any

from plait.testing.sim.machine import Machine
from plait.testing.sim.timeline import Timeline
from plait.testing.sim.transport import Address, Endpoint, Loop, Pipe

LOOPBACK = ("127.0.0.1", "localhost", "::1")
#: The first port that the network assigns to a bind to port 0.
FIRST_FREE_PORT = 20_000
#: Each connection gets one of these limits of the bytes that one direction has in flight or unread.
WINDOWS = (16 * 1024, 64 * 1024, 256 * 1024, 1024 * 1024)
#: The pause before an unanswered connection request is repeated. It doubles with each repetition.
DIAL_AGAIN_SECONDS = 1.0

Factory = Callable[[], asyncio.BaseProtocol]


class Network:
    """The network of a ``Simulation``, which creates it."""

    def __init__(self, timeline: Timeline, rng: random.Random) -> None:
        self.timeline = timeline
        self.random = rng
        #: The lowest and the highest usual latency, in seconds.
        self.latency_seconds = (0.00005, 0.0005)
        #: The highest latency of a spike, and the probability of a spike.
        self.spike_seconds = 0.05
        self.spike_odds = 0.01
        #: The probability that a read returns only a part of the bytes that have arrived.
        self.cut_odds = 0.1
        #: The probability that a connection ends with a reset although all its bytes were read.
        self.reset_odds = 0.1
        #: TCP resends at most this long after a cut ends.
        self.retry_seconds = 1.0
        #: The shortest and the longest time after which TCP gives up a connection, in seconds.
        self.give_up_seconds = (15.0, 30.0)
        self._listeners: dict[Address, SimListener] = {}
        #: Address → the machine of the last process that listened there. It refuses connections if no process listens.
        self._owners: dict[Address, Machine] = {}
        self._endpoints: dict[Endpoint, Endpoint] = {}
        self._cuts: dict[tuple[Machine, Machine], None] = {}
        #: Pipes with bytes that a cut holds back; their endpoints may be closed.
        self.holding: dict[Pipe, None] = {}
        self._next_port = FIRST_FREE_PORT

    # --- chance ---------------------------------------------------------------------------------

    def latency(self) -> float:
        low, high = self.latency_seconds
        if self.random.random() < self.spike_odds:
            high = max(high, self.spike_seconds)
        return self.random.uniform(low, high)

    def chunk(self, size: int) -> int:
        """How many of ``size`` bytes one read returns."""
        if size > 1 and self.random.random() < self.cut_odds:
            return self.random.randint(1, size)
        return size

    # --- cuts -----------------------------------------------------------------------------------

    def cut(self, source: Machine, target: Machine, *, both: bool = True) -> None:
        """Cut the network from ``source`` to ``target`` and, if ``both``, from ``target`` to ``source``."""
        self.timeline.log(source.name, f"is cut off from {target.name}" + ("" if both else ", one way"))
        self._cuts[source, target] = None
        if both:
            self._cuts[target, source] = None

    def mend(self, one: Machine, other: Machine) -> None:
        if self.is_cut(one, other) or self.is_cut(other, one):
            self.timeline.log(one.name, f"reaches {other.name} again")
            self._cuts.pop((one, other), None)
            self._cuts.pop((other, one), None)
            self._healed()

    def heal(self) -> None:
        if self._cuts:
            self.timeline.log("network", "is whole")
            self._cuts.clear()
            self._healed()

    def is_cut(self, source: Machine, target: Machine) -> bool:
        """Whether bytes from ``source`` cannot reach ``target``."""
        return bool(self._cuts) and (source, target) in self._cuts

    def _healed(self) -> None:
        for pipe in self.holding:
            pipe.retry()
        self.holding.clear()
        for one, other in list(self._endpoints.items()):
            if not (self.is_cut(one.machine, other.machine) or self.is_cut(other.machine, one.machine)):
                one.healed()

    # --- listening and dialling -----------------------------------------------------------------

    def listen(self, loop: Loop, machine: Machine, factory: Factory, host: str, port: int) -> SimListener:
        if not port:
            port, self._next_port = self._next_port, self._next_port + 1
        address = (_canonical(host), port)
        if address in self._listeners:
            raise OSError(errno.EADDRINUSE, f"error while attempting to bind on address {address}: in use")
        listener = self._listeners[address] = SimListener(self, loop, machine, factory, address)
        self._owners[address] = machine
        return listener

    def unlisten(self, listener: SimListener) -> None:
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]

    async def connect(
        self, loop: Loop, machine: Machine, factory: Factory, host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connect to the address; raises ``OSError`` as a real network does."""
        dialling = _Dialling(self, loop, machine, factory, (_canonical(host), port))
        try:
            return await dialling.future
        except BaseException:
            dialling.abandon()
            raise

    def join(self, loop: Loop, machine: Machine, listener: SimListener) -> Endpoint:
        """Make both ends of a connection and return the end of ``machine``. The listener will accept the other end."""
        port, self._next_port = self._next_port, self._next_port + 1
        here = ("127.0.0.1", port)
        one = Endpoint(self, loop, machine, here, listener.address)
        other = Endpoint(self, listener.loop, listener.machine, listener.address, here)
        window = self.random.choice(WINDOWS)
        one.out = other.into = Pipe(self, one, other, window)
        other.out = one.into = Pipe(self, other, one, window)
        self._endpoints[one] = other
        self._endpoints[other] = one
        listener.loop.call_soon(listener.accept, other)
        return one

    def window_opened(self, reader: Endpoint) -> None:
        """``reader`` has read bytes, so the other end may send more, after the latency."""
        writer = self._endpoints.get(reader)
        if writer is not None and writer.get_write_buffer_size() and not self.is_cut(reader.machine, writer.machine):
            self.timeline.call_later(self.latency(), writer.write_soon)

    def closed(self, endpoint: Endpoint) -> None:
        self._endpoints.pop(endpoint, None)

    def _died(self, machine: Machine, *, silent: bool) -> None:
        """Close the sockets of a dead process. If ``silent``, do not notify the peers."""
        for listener in list(self._listeners.values()):
            if listener.machine is machine:
                self.unlisten(listener)
        for endpoint in list(self._endpoints):
            if endpoint.machine is machine:
                endpoint.vanish(silent=silent)


class SimListener(asyncio.AbstractServer):
    """A server socket."""

    def __init__(self, network: Network, loop: Loop, machine: Machine, factory: Factory, address: Address) -> None:
        self._network = network
        self.loop = loop
        self.machine = machine
        self.address = address
        self._factory = factory

    @property
    def sockets(self) -> tuple[Any, ...]:
        """As in ``asyncio.Server``. The sockets have only a name."""
        return (_Socket(self.address),)

    def accept(self, endpoint: Endpoint) -> None:
        """Accept a connection in the process."""
        if not self.is_serving():
            endpoint.abort()
            return
        endpoint.begin(self._factory())

    def is_serving(self) -> bool:
        return self._network._listeners.get(self.address) is self

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self.loop

    def close(self) -> None:
        self._network.unlisten(self)

    async def wait_closed(self) -> None:
        """Return at once. Open connections stay open."""

    async def start_serving(self) -> None:
        """Does nothing: the server listens from the beginning."""

    async def serve_forever(self) -> None:
        await self.loop.create_future()


class _Socket:
    def __init__(self, address: Address) -> None:
        self._address = address

    def getsockname(self) -> Address:
        return self._address

    def fileno(self) -> int:
        """Return -1, because there is no file descriptor."""
        return -1


class _Dialling:
    """One attempt to connect, with TCP's repeated requests."""

    def __init__(self, network: Network, loop: Loop, machine: Machine, factory: Factory, address: Address) -> None:
        self._network = network
        self._loop = loop
        self._machine = machine
        self._factory = factory
        self._address = address
        self._pause = DIAL_AGAIN_SECONDS
        self._endpoint: Endpoint | None = None
        self.future: asyncio.Future[tuple[asyncio.Transport, asyncio.BaseProtocol]] = loop.create_future()
        self._ask()

    def _ask(self) -> None:
        if not self.future.done() and not self._loop.is_closed():
            self._network.timeline.call_later(self._network.latency(), self._asked)

    def _asked(self) -> None:
        network, machine = self._network, self._machine
        if self.future.done() or self._loop.is_closed():
            return
        listener = network._listeners.get(self._address)
        owner = network._owners.get(self._address) if listener is None else listener.machine
        if owner is not None and (
            not owner.powered or network.is_cut(machine, owner) or network.is_cut(owner, machine)
        ):
            network.timeline.call_later(self._pause, self._ask)
            self._pause *= 2
        elif listener is None:
            error = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            network.timeline.call_later(network.latency(), self._loop.call_soon, self._end, error)
        else:
            self._endpoint = network.join(self._loop, self._machine, listener)
            network.timeline.call_later(network.latency(), self._loop.call_soon, self._end, None)

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
        """Close the connection, if there is one, because the caller was cancelled."""
        if self._endpoint is not None:
            self._endpoint.abort()


def _canonical(host: str) -> str:
    return LOOPBACK[0] if host in LOOPBACK else host
