"""Acks and nacks that could not be sent, on disk until the broker answers.

Without it they are in memory: a process that ends while the broker is away takes them along, and what it had done is
delivered again. Each consumer has a file of its own for each partition, named by subject, group, client id and
partition; so the id has to be one that the next process has, too.
"""

from __future__ import annotations

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
    """Ranges that failed in one way. A file of an older version ends after the ranges."""

    delay: float | None
    ranges: list[EpochRange]
    reason: Reason | None = None
    reject: bool = False
    counted: bool = True


class SpooledOutcomes(msgspec.Struct, array_like=True):
    """What is to be said, and of what; the names tell who the file belongs to."""

    subject: str
    group: str
    client: str
    partition: int
    acks: list[EpochRange]
    nacks: list[SpooledNack]
    #: The partition's name.
    place: str = ""

    def failures(self) -> Nacks:
        """What failed, by how."""
        return {FailureOutcome(nack.delay, nack.reason, nack.reject, nack.counted): nack.ranges for nack in self.nacks}


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(SpooledOutcomes)


def spool_directory(path: str | os.PathLike[str], client_id: str | None) -> Path:
    """The directory, made if need be; refused where it could be of no use."""
    if client_id is None:
        raise InvalidArgument("a spool needs a client_id: only who comes back under the same one finds it again")
    directory = Path(path)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"the spool {str(directory)!r} cannot be made: {error.strerror or error}") from None
    return directory


class AckSpool:
    """The file of one consumer for one partition."""

    def __init__(self, directory: Path, subject: str, group: str, client: str, place: str) -> None:
        self._names = (subject, group, client)
        self._place = place
        self._path = directory / f"{xxh3_64_hexdigest(' '.join((*self._names, place)).encode())}.words"
        #: What the file is to have; None: there is to be none.
        self._wanted: bytes | None = None
        #: Changes so far, and the newest that was carried out: threads may carry them out in any order.
        self._number = 0
        self._written = 0
        self._lock = threading.Lock()

    def load(self) -> SpooledOutcomes | None:
        """What an earlier process could not say."""
        try:
            data = self._path.read_bytes()
            words = _decoder.decode(data)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("%s cannot be read, what it says is delivered again: %s", self._path, error)
            return None
        if (words.subject, words.group, words.client, words.place) != (*self._names, self._place):
            return None
        self._wanted = data
        return words

    def change(self, partition: int, acks: list[EpochRange], nacks: Nacks) -> Callable[[], None] | None:
        """Keep this, and nothing of what was kept before: what a thread has to do for it; None: nothing.

        It ends with a sync, which takes as long as the disk does: not on a user's loop.
        """
        data = None
        if acks or nacks:
            kept = [
                SpooledNack(how.delay, ranges, how.reason, how.reject, how.counted) for how, ranges in nacks.items()
            ]
            data = _encode(SpooledOutcomes(*self._names, partition, acks, kept, self._place))
        if data == self._wanted:
            return None
        self._wanted = data
        self._number += 1
        return functools.partial(self._write, self._number, data)

    def _write(self, number: int, data: bytes | None) -> None:
        """From any thread; a change that came later counts, also where it was carried out before."""
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
                # They are in memory still; the next change tries again.
                self._wanted = b""
                log.warning("acks cannot be kept on disk: %s", error)

    def _replace(self, data: bytes) -> None:
        new = self._path.with_suffix(".new")
        # What failed, and why, is for the user of this process alone.
        with open(new, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._path)
