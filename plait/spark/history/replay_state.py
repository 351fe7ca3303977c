"""The state file of a replay: what a process needs to resume the replay after a crash.

Before a batch is sent, the file records the producer sequences of the batch. Before the next batch is sent, the file
records that this one is stored. So after a crash at most one batch is in doubt, and it is resent with the same producer
sequences.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from plait.client.send.resumable_sender import SendPosition
from plait.errors import InvalidArgument

FORMAT_VERSION: Final = 1


class ReplayMark(msgspec.Struct, frozen=True):
    """A position in a partition: a sequence, and the latest store time up to it."""

    sequence: int
    time: int


class InDoubt(msgspec.Struct, frozen=True):
    """A batch that was about to be sent: its number of rows, and a digest that identifies them."""

    count: int
    digest: str


class ReplayState(msgspec.Struct, frozen=True, kw_only=True):
    """A replay before a batch is sent."""

    version: int = FORMAT_VERSION
    #: Its name, which is in the headers of the messages that it sends.
    run: str
    #: Its arguments: a replay with other arguments must not resume from this state.
    request: dict[str, Any]
    #: The known addresses of the cluster that it sends to.
    servers: list[str] = []
    #: The store times, in microseconds, of the messages to send, both inclusive.
    time_min: int
    time_max: int
    #: The last message of each partition when the replay began; later ones are not sent. By sequence and by the store
    #: times of the brokers, since the clock of this machine may differ. None: nothing was read yet.
    ends: dict[str, ReplayMark] | None = None
    count: int = 0
    marks: dict[str, ReplayMark] = {}
    position: SendPosition | None = None
    in_doubt: InDoubt | None = None
    finished: bool = False


class StateFile:
    """A locked state file: one process at a time uses it. With ``None`` for a path nothing is stored."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock: int | None = None
        if path is not None:
            self._lock = _locked(path)

    def load(self, request: dict[str, Any]) -> ReplayState | None:
        """The state of an earlier process; ``InvalidArgument`` if it is of another replay, or not a state file."""
        if self._path is None or not self._path.exists():
            return None
        try:
            state = msgspec.json.decode(self._path.read_bytes(), type=ReplayState)
        except msgspec.MsgspecError as error:
            raise InvalidArgument(
                f"{str(self._path)!r} is not the state of a replay: {error}; use another file"
            ) from None
        if state.version > FORMAT_VERSION:
            raise InvalidArgument(f"{str(self._path)!r} is of a newer Plait; resume with that version")
        for name, value in request.items():
            if state.request.get(name) != value:
                raise InvalidArgument(
                    f"{str(self._path)!r} is of another replay: its {name} is {state.request.get(name)!r}, not "
                    f"{value!r}; use another state file, or the same arguments"
                )
        return state

    def same_cluster(self, state: ReplayState, servers: Sequence[str]) -> ReplayState:
        """The state with all known addresses; ``InvalidArgument`` if ``servers`` are of another cluster."""
        if state.servers and not set(servers) & set(state.servers):
            raise InvalidArgument(
                f"{str(self._path)!r} is of another replay: it sends to {', '.join(state.servers)}, and not to "
                f"{', '.join(servers)}; give one of those servers, or another state file"
            )
        return msgspec.structs.replace(state, servers=sorted({*state.servers, *servers}))

    def save(self, state: ReplayState) -> None:
        """Write the state; it is durable when this returns."""
        if self._path is None:
            return
        aside = self._path.with_name(f".{self._path.name}.new")
        with open(aside, "wb") as file:
            file.write(msgspec.json.encode(state))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self._path)
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _locked(path: Path) -> int:
    import fcntl

    try:
        lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InvalidArgument(f"state file {str(path)!r} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise InvalidArgument(f"another process uses the state file {str(path)!r}; wait until it ends") from None
    return lock
