"""Runs coroutines: on uvloop if it is installed, and with a client for commands that talk to a node."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from plait.client.client import Client

T = TypeVar("T")

#: How long a node may take to reply to the first hello.
DIAL_SECONDS = 5.0


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. Ctrl-C cancels it and raises ``KeyboardInterrupt``."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)


def with_client(server: str, work: Callable[[Client], Awaitable[T]]) -> T:
    """Run ``work`` with a client of ``server``. Raises ``Unavailable`` at once if no server listens there."""
    return run_loop(_with_client(server, work))


async def _with_client(server: str, work: Callable[[Client], Awaitable[T]]) -> T:
    from plait.client.client import connect

    addresses = [address.strip() for address in server.split(",")]
    await _check_reachable(addresses)
    async with connect(addresses) as client:
        return await work(client)


async def _check_reachable(addresses: list[str]) -> None:
    """Fail at once if no server is reachable. A client would wait, as the server may be restarting."""
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
