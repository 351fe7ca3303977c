"""Keeps unsent acks and nacks on disk until the broker has stored them.

Without a spool they are in memory only: if the process ends while the broker is unreachable they are lost, and the
messages are delivered again. Each consumer has one file per partition, named after subject, group, client id and
partition, so the next process must use the same client id to find it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
from xxhash import xxh3_64_hexdigest

from plait.client.consume.failure import EpochRange, FailureOutcome, Nacks
from plait.errors import InvalidArgument
from plait.model.reason import Reason

log = logging.getLogger("plait.client")


class SpooledNack(msgspec.Struct, array_like=True):
    """Ranges with the same failure outcome. A file of an older version ends after ``ranges``."""

    delay: float | None
    ranges: list[EpochRange]
    reason: Reason | None = None
    reject: bool = False
    counted: bool = True


class SpooledOutcomes(msgspec.Struct, array_like=True):
    """The content of a spool file: unsent outcomes, and the names that identify the consumer and partition."""

    subject: str
    group: str
    client: str
    partition: int
    acks: list[EpochRange]
    nacks: list[SpooledNack]
    #: The partition's name.
    place: str = ""

    def failures(self) -> Nacks:
        return {FailureOutcome(nack.delay, nack.reason, nack.reject, nack.counted): nack.ranges for nack in self.nacks}


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(SpooledOutcomes)


def spool_directory(path: str | os.PathLike[str], client_id: str | None) -> Path:
    """Create the spool directory if needed and return it. ``InvalidArgument`` without a client id."""
    if client_id is None:
        raise InvalidArgument("spool= needs client_id=: a restarted process finds its spool by the client id")
    directory = Path(path)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(
            f"spool directory {str(directory)!r} cannot be created: {error.strerror or error}"
        ) from None
    return directory


class AckSpool:
    """The spool file of one consumer for one partition."""

    def __init__(self, directory: Path, subject: str, group: str, client: str, place: str) -> None:
        self._names = (subject, group, client)
        self._place = place
        self._path = directory / f"{xxh3_64_hexdigest(' '.join((*self._names, place)).encode())}.outcomes"
        #: The content that the file should have; None: there should be no file.
        self._wanted: bytes | None = None
        #: The number of changes requested, and the newest change written: threads may run the writes in any order.
        self._number = 0
        self._written = 0
        self._lock = threading.Lock()
        #: The latest write of ``save``.
        self._writing: asyncio.Future[None] | None = None

    def load(self) -> SpooledOutcomes | None:
        """The outcomes that an earlier process could not send; None: there are none, or the file cannot be read."""
        try:
            data = self._path.read_bytes()
            outcomes = _decoder.decode(data)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("spool file %s cannot be read, its messages are delivered again: %s", self._path, error)
            return None
        if (outcomes.subject, outcomes.group, outcomes.client, outcomes.place) != (*self._names, self._place):
            return None
        self._wanted = data
        return outcomes

    def change(self, partition: int, acks: list[EpochRange], nacks: Nacks) -> Callable[[], None] | None:
        """Replace the spooled outcomes. Returns the write, to be run in a thread; None: the file is up to date.

        The write ends with an fsync, so it must not run on the user's event loop.
        """
        data = None
        if acks or nacks:
            spooled = [
                SpooledNack(how.delay, ranges, how.reason, how.reject, how.counted) for how, ranges in nacks.items()
            ]
            data = _encode(SpooledOutcomes(*self._names, partition, acks, spooled, self._place))
        if data == self._wanted:
            return None
        self._wanted = data
        self._number += 1
        return functools.partial(self._write, self._number, data)

    async def save(self, partition: int, acks: list[EpochRange], nacks: Nacks) -> None:
        """Replace the spooled outcomes. The write continues if the caller is cancelled."""
        write = self.change(partition, acks, nacks)
        if write is not None:
            self._writing = asyncio.get_running_loop().run_in_executor(None, write)
            await asyncio.shield(self._writing)

    async def saved(self) -> None:
        if self._writing is not None:
            await self._writing

    def _write(self, number: int, data: bytes | None) -> None:
        """Write the file, from any thread. A change older than the one already written is skipped."""
        with self._lock:
            if number < self._written:
                return
            self._written = number
            try:
                if data is None:
                    self._path.unlink(missing_ok=True)
                else:
                    self._replace(data)
            except OSError as error:
                # The outcomes are still in memory. The empty content differs from any, so the next change writes again.
                self._wanted = b""
                log.warning("unsent acks cannot be written to spool file %s: %s", self._path, error)

    def _replace(self, data: bytes) -> None:
        new = self._path.with_suffix(".new")
        # Readable by the owner only: failure reasons may contain private data.
        with open(new, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._path)
