"""An ordered consumer process: ``python -m tests.support.ordered_handler ADDRESSES NAME HISTORY SINK SEED KIND``.

Runs until SIGTERM, and then finishes its current messages. For each message it asks the sink for permission, works a
little, fails now and then, writes to the sink, and acks. It records all of that in a history, with the sink's times.
There are three kinds: ``iterate`` with several tasks, ``fetch`` in batches, and ``app``.
"""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import sys
import time

import plait
import plait.client.app.app as app_module
from plait.client.app.app_run import AppRun
from plait.client.consume.ordered.ordered_pull import OrderedPullClient
from plait.errors import PlaitError
from plait.model.logical_partitions import lp_of_key, runs_of
from plait.testing.history import Handling, History
from tests.support.ordered_sender import LIMITS, SUBJECT
from tests.support.sink import SinkClient

GROUP = "billing"
#: The policy allows so many attempts that no key is parked.
RETRY = plait.Retry(attempts=1_000, first=0.05, longest=0.3)
TASKS = 3
FAILURES = 0.02
WORK_SECONDS = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.003, 0.01, 0.1)
#: How often the process looks at the clock, and the gap between two looks that counts as a stall. After a stall the
#: lease may be lost.
LOOK_SECONDS = 0.1
STALL_SECONDS = 0.5
PAUSE_SECONDS = 0.3


class _Fenced(Exception):
    """Another consumer has used a higher epoch."""


class _Failed(Exception):
    """The handler has failed."""


class _AppRun(AppRun):
    """Records that the process was asked to stop its app."""

    stop_requested = False

    def stop(self) -> None:
        _AppRun.stop_requested = True
        super().stop()


class Handler:
    """Consumes as one of the three kinds until SIGTERM."""

    def __init__(self, addresses: str, name: str, history: History, sink: SinkClient, draw: random.Random) -> None:
        self._addresses = addresses
        self._name = name
        self._history = history
        self._sink = sink
        self._random = draw
        self._stop = asyncio.Event()
        self._ready = False

    async def run(self, kind: str) -> None:
        """Handle messages until SIGTERM; after any error of Plait it tries again."""
        self._install_signal_handlers()
        watching = asyncio.ensure_future(self._watch())
        while not self._stop.is_set():
            try:
                await (self._app() if kind == "app" else self._consume(kind))
            except PlaitError as error:
                print(f"{self._name}: {error!r}; trying again", file=sys.stderr, flush=True)
                await asyncio.sleep(PAUSE_SECONDS)
        watching.cancel()

    def _install_signal_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        loop.add_signal_handler(signal.SIGUSR1, self._print_state)

    def _print_state(self) -> None:
        """Print what this consumer holds and waits for, to show why messages are not handled."""
        for client in [each for each in gc.get_objects() if isinstance(each, OrderedPullClient)]:
            rights, pending = client.rights, client.collector.pending
            facts = {
                "attached": client.session is not None,
                "retiring": client.retiring,
                "wants": runs_of(client._wanted),
                "has": runs_of(rights.open),
                "again": runs_of(rights.again),
                "valid": rights.valid(),
                "asking": client._asking,
                "early": len(client._early),
                "pulls": client.pulls,
                "room": client.wanted(),
                "open": [(each.tag, each.states.tolist(), each.open_ranges()) for each in client.deliveries.open],
                "pending": pending.plain(),
                "failing": [each.known_at for each in client._key_holds.failing],
            }
            print(f"{self._name} {client.partition}: {facts}", file=sys.stderr, flush=True)
        for task in asyncio.all_tasks():
            task.print_stack(file=sys.stderr)

    async def _watch(self) -> None:
        """Record stalls of the process: a stall excuses overlaps with other consumers."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            if now - last > STALL_SECONDS:
                self._history.broken("stalled", last, until=now, consumer=self._name)
            last = now

    def _print_ready(self) -> None:
        if not self._ready:
            self._ready = True
            print("ready", flush=True)

    # --- kinds ----------------------------------------------------------------------------------

    async def _consume(self, kind: str) -> None:
        prefetch = self._random.choice((1, 20, 500))
        async with (
            plait.connect(self._addresses, client_id=self._name, limits=LIMITS) as client,
            client.consumer(SUBJECT, GROUP, ordered=True, retry=RETRY, prefetch=prefetch) as consumer,
        ):
            self._print_ready()
            if kind == "fetch":
                await self._fetch(consumer)
            else:
                await self._iterate(consumer)

    async def _iterate(self, consumer: plait.Consumer) -> None:
        tasks = [asyncio.ensure_future(self._each(consumer)) for _ in range(TASKS)]
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*tasks, stopping):
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for each in ended:
            if isinstance(each, Exception):
                raise each

    async def _each(self, consumer: plait.Consumer) -> None:
        async for message in consumer:
            work = asyncio.ensure_future(self._one(consumer, message))
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                # A consumer that leaves finishes its current message.
                await work
                raise

    async def _one(self, consumer: plait.Consumer, message: plait.Message) -> None:
        handling = await self._try(message)
        if handling is not None:
            await self._flush(consumer, [handling])

    async def _fetch(self, consumer: plait.Consumer) -> None:
        while not self._stop.is_set():
            batch = await consumer.fetch(self._random.choice((1, 10, 50)), wait=0.3)
            failed: set[str | None] = set()
            done = []
            for message in batch:
                # Messages after a failed one are delivered again after it.
                if message.key not in failed:
                    handling = await self._try(message)
                    if handling is None:
                        failed.add(message.key)
                    else:
                        done.append(handling)
            if done:
                await self._flush(consumer, done)

    async def _try(self, message: plait.Message) -> Handling | None:
        """Handle a message and ack or nack it; returns the handling if it succeeded."""
        try:
            handling = await self._handle(message)
        except (_Fenced, _Failed):
            message.nack(delay=0.05)
            return None
        message.ack()
        return handling

    async def _flush(self, consumer: plait.Consumer, handlings: list[Handling]) -> None:
        try:
            await consumer.flush()
        except PlaitError:
            for handling in handlings:
                handling.ack_unknown(time.monotonic())
            raise
        for handling in handlings:
            handling.ack_ok(time.monotonic())

    async def _app(self) -> None:
        app = plait.App(self._addresses, group=GROUP, client_id=self._name, limits=LIMITS)

        @app.subscriber(SUBJECT, ordered=True, concurrency=TASKS, retry=RETRY)
        async def handle(message: plait.Message) -> None:
            try:
                await self._handle(message)
            except (_Fenced, _Failed):
                raise plait.RetryLater(0.05) from None

        @app.on_startup
        async def ready() -> None:
            self._print_ready()

        stopping = asyncio.ensure_future(self._stop.wait())
        stopping.add_done_callback(lambda _: app.stop())
        try:
            await app.run()
        finally:
            if _AppRun.stop_requested:
                # The app caught the signal; an error while it left must not start it again.
                self._stop.set()
            self._install_signal_handlers()
            stopping.cancel()

    # --- handling -------------------------------------------------------------------------------

    async def _handle(self, message: plait.Message) -> Handling:
        assert message.key is not None
        lp = lp_of_key(message.key)
        epoch = message.epoch
        begun = await self._sink.begin(lp, epoch)
        if not begun.accepted:
            raise _Fenced
        value = message.body.decode()
        place = (str(message.partition), message.sequence)
        handling = self._history.handle(
            self._name, message.key, value, message.attempt, epoch, lp, place, begun.time, group=GROUP
        )
        # Some messages take so long that the process may be stopped or killed meanwhile.
        await asyncio.sleep(self._random.choice(WORK_SECONDS))
        if self._random.random() < FAILURES:
            handling.failed(time.monotonic())
            raise _Failed
        producer, _, number = value.rpartition(":")
        written = await self._sink.write(lp, epoch, message.key, producer, int(number))
        if not written.accepted:
            handling.failed(written.time)
            raise _Fenced
        handling.done(written.time)
        return handling


async def run(addresses: str, name: str, path: str, sink: str, seed: str, kind: str) -> None:
    history, client = History(path), SinkClient(sink, name)
    try:
        await Handler(addresses, name, history, client, random.Random(f"{seed} {path}")).run(kind)
    finally:
        await client.close()
        history.close()


def main() -> None:
    app_module.AppRun = _AppRun
    asyncio.run(run(*sys.argv[1:]))


if __name__ == "__main__":
    main()
