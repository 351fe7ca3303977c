"""A sink that handlers write to. It refuses a handler whose epoch is too low.

It runs in the test's own process, which is not killed, and timestamps every request, so that the histories of many
processes have one clock. A handler asks before it begins, and again when it writes; both requests carry the epoch of
the lock. Once the sink has seen a higher epoch of a logical partition, it refuses lower ones.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import NamedTuple


class Answer(NamedTuple):
    """Whether the request was accepted, and when (seconds, on the machine's monotonic clock)."""

    accepted: bool
    time: float


class Sink:
    """Serves a socket at ``path`` for ``async with``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: Logical partition → the highest epoch seen, and its consumer.
        self._epochs: dict[int, tuple[int, str]] = {}
        #: (key, producer) → the number that was written last.
        self._last: dict[tuple[str, str], int] = {}
        #: The written values, as (producer, number).
        self.written: set[tuple[str, int]] = set()
        #: The number of requests that were refused for a lower epoch, and of messages that were written again.
        self.refused = 0
        self.repeated = 0
        #: The number of times that a logical partition got another owner.
        self.handovers = 0
        self.violations: list[str] = []
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Sink:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._open):
            writer.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while line := await reader.readline():
                if not line.endswith(b"\n"):
                    break
                consumer, lp, epoch, write = json.loads(line)
                accepted = self.begin(consumer, lp, epoch)
                if accepted and write is not None:
                    self.write(consumer, *write)
                writer.write(json.dumps(Answer(accepted, time.monotonic())).encode() + b"\n")
        except ConnectionError:
            # The client was killed.
            pass
        finally:
            self._open.discard(writer)
            writer.close()

    def begin(self, consumer: str, lp: int, epoch: int) -> bool:
        """Return False if the sink has seen a higher epoch of the logical partition."""
        highest, owner = self._epochs.get(lp, (0, consumer))
        if epoch < highest:
            self.refused += 1
            return False
        if epoch == highest and owner != consumer:
            self.violations.append(f"{consumer} and {owner} both have epoch {epoch} of logical partition {lp}")
        if owner != consumer:
            self.handovers += 1
        self._epochs[lp] = (epoch, consumer)
        return True

    def write(self, consumer: str, key: str, producer: str, number: int) -> None:
        """Record a handled message; the numbers of a producer must increase per key."""
        value = (producer, number)
        if value in self.written:
            self.repeated += 1
            return
        last = self._last.get((key, producer), -1)
        if number < last:
            self.violations.append(f"{consumer} wrote {producer}:{number} of {key} after {producer}:{last}")
        self._last[key, producer] = max(last, number)
        self.written.add(value)


class SinkClient:
    """A handler's connection to the sink: one request at a time."""

    def __init__(self, path: str, consumer: str) -> None:
        self._path = path
        self._consumer = consumer
        self._lock = asyncio.Lock()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def begin(self, lp: int, epoch: int) -> Answer:
        """Ask for permission to begin with a message."""
        return await self._ask(lp, epoch, None)

    async def write(self, lp: int, epoch: int, key: str, producer: str, number: int) -> Answer:
        """Write a handled message."""
        return await self._ask(lp, epoch, (key, producer, number))

    async def _ask(self, lp: int, epoch: int, write: tuple[str, str, int] | None) -> Answer:
        async with self._lock:
            if self._reader is None or self._writer is None:
                self._reader, self._writer = await asyncio.open_unix_connection(self._path)
            self._writer.write(json.dumps((self._consumer, lp, epoch, write)).encode() + b"\n")
            return Answer(*json.loads(await self._reader.readline()))

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            await self._writer.wait_closed()
