"""Processes that write orders and relay them, and kill or stop themselves at a chosen step of the protocol.

``python -m tests.outbox.victim`` reads one request a line, forks a process that carries it out, and reports how that
process ended. Forking is much faster than starting an interpreter for each of them.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec
from sqlalchemy.orm import Session

import plait
from plait.client.send.numbered_sender import NumberedSender
from plait.outbox.frame_queues import FrameQueues
from plait.outbox.leader import Leader
from plait.outbox.relay_store import RelayStore
from tests.outbox.shop import KEYS, add_event, engine_of, outbox

LEASE_SECONDS = 0.4
#: The steps, and at which occurrence the process ends.
STEPS = {
    "before the commit of a transaction": 4,
    "after the commit of a transaction": 4,
    "before the commit of the sequences": 3,
    "after the sequences are written": 3,
    "while a frame is sent": 3,
    "before the lease is taken": 1,
    "after a frame is stored": 3,
    "after the lease is taken": 1,
    "before the commit of a deletion": 2,
    "before frames are sent again": 1,
    "after a deletion": 2,
}


class Request(msgspec.Struct):
    """One process: where it works, and at which step it gets the signal."""

    url: str
    address: str
    step: str
    signal: int = signal.SIGKILL
    seed: int = 0


class Steps:
    """Ends the process at the given occurrence of a step."""

    def __init__(self, request: Request) -> None:
        self.request = request
        #: A process that was stopped at the step runs again.
        self.passed = threading.Event()
        self.left = STEPS[request.step] if request.signal == signal.SIGKILL else 1
        #: The last transaction of the relay has deleted rows.
        self.deleted = False

    def reached(self, step: str, condition: object = True) -> None:
        if step == self.request.step and condition:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), self.request.signal)
                self.passed.set()

    def install(self) -> None:
        """Watch the steps of the relay."""
        store, leader, sender = RelayStore, Leader, NumberedSender

        def turn(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            frames = original(*args, **kwargs)
            self.reached("before the commit of the sequences", kwargs["planned"])
            self.reached("before the commit of a deletion", kwargs["stored"])
            self.deleted = bool(kwargs["stored"])
            return frames

        def take(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            taken = original(*args, **kwargs)
            self.reached("before the lease is taken", taken)
            return taken

        def send(original: Callable[..., Any], this: Any, frames: list[Any]) -> Any:
            self.reached("after the sequences are written", frames)
            return original(this, frames)

        def stored(original: Callable[..., Any], *args: Any) -> Any:
            self.reached("after a frame is stored")
            return original(*args)

        async def recover(original: Callable[..., Any], this: Any) -> None:
            self.reached("after the lease is taken")
            await original(this)
            self.reached("before frames are sent again")

        async def whole_turn(original: Callable[..., Any], this: Any) -> Any:
            self.deleted = False
            result = await original(this)
            self.reached("after a deletion", self.deleted)
            return result

        async def transmit(original: Callable[..., Any], *args: Any) -> None:
            sending = asyncio.ensure_future(original(*args))
            await asyncio.wait([sending], timeout=0.001 * self.request.seed)
            self.reached("while a frame is sent")
            await sending

        for owner, name, function in (
            (store, "turn", turn),
            (store, "take", take),
            (leader, "_send", send),
            (FrameQueues, "stored", stored),
            (leader, "_recover", recover),
            (leader, "_turn", whole_turn),
            (sender, "_send", transmit),
        ):
            replace(owner, name, function)


def replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: function(original, *args, **kwargs))


def write(engine: Any, steps: Steps, chosen: random.Random) -> None:
    """One transaction of a few events; some are rolled back."""
    with Session(engine) as session:
        for key in sorted(chosen.sample(KEYS, chosen.randint(1, 3))):
            add_event(session, key, steps.request.step)
        if chosen.random() < 0.2:
            return
        steps.reached("before the commit of a transaction")
        session.commit()
    steps.reached("after the commit of a transaction")


async def work(request: Request) -> None:
    """Write and relay until the signal.

    A process that is stopped must not hold locks of the database, so it writes before it relays, and after it wakes.
    """
    steps = Steps(request)
    steps.install()
    engine = engine_of(request.url)
    chosen = random.Random(request.seed)
    stops = request.signal == signal.SIGSTOP
    for _ in range(10 if stops else 0):
        write(engine, steps, chosen)
    async with plait.connect(request.address) as client, outbox.relay(client, engine, lease=LEASE_SECONDS, poll=0.02):
        if stops:
            await asyncio.to_thread(steps.passed.wait)
        while True:
            await asyncio.to_thread(write, engine, steps, chosen)


def main() -> None:
    for line in sys.stdin:
        request = msgspec.json.decode(line, type=Request)
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(work(request))
            finally:
                os._exit(1)
        print(child, flush=True)
        _, status = os.waitpid(child, os.WUNTRACED)
        print(-os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
