"""Running coroutines: on uvloop where it is present, and with a client where a command talks to a node."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from plait.client.client import Client

T = TypeVar("T")

#: How long a node may take to answer the first hello.
DIAL_SECONDS = 5.0


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; Ctrl-C cancels it and raises ``KeyboardInterrupt``."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)


def with_client(server: str, work: Callable[[Client], Awaitable[T]]) -> T:
    """Run ``work`` with a client of ``server``; raises ``Unavailable`` at once where nobody listens."""
    return run_loop(_with_client(server, work))


async def _with_client(server: str, work: Callable[[Client], Awaitable[T]]) -> T:
    from plait.client.client import connect

    addresses = [address.strip() for address in server.split(",")]
    await _knock(addresses)
    async with connect(addresses) as client:
        return await work(client)


async def _knock(addresses: list[str]) -> None:
    """A client waits for a server that may be restarting; somebody at a terminal wants to know now."""
    from plait.client.client import new_client_id
    from plait.errors import Unavailable
    from plait.wire.link import dial

    for number, address in enumerate(addresses, 1):
        try:
            link = await dial(address, new_client_id(), DIAL_SECONDS)
        except Unavailable:
            if number == len(addresses):
                raise
        else:
            link.close()
            return
