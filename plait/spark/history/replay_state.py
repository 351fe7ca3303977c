"""How far a replay has come, in a file: what the process that goes on after a crash has to know.

Before rows leave, the file says which numbers they go under; when the next ones are about to leave, that they are
stored. So after a crash at any moment one batch is in doubt, and it is sent again under the same numbers.
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
    """Of a partition: a sequence, and the latest store time until there."""

    sequence: int
    time: int


class InDoubt(msgspec.Struct, frozen=True):
    """Rows that were about to leave: how many, and what shows that they are the same ones."""

    count: int
    digest: str


class ReplayState(msgspec.Struct, frozen=True, kw_only=True):
    """One replay, as of the moment before some rows left."""

    version: int = FORMAT_VERSION
    #: Its name, which is in the headers of what it sends.
    run: str
    #: What was asked for: another replay must not go on with this one's state.
    request: dict[str, Any]
    #: Addresses of the cluster that it sends to, as far as they were known.
    servers: list[str] = []
    #: Messages that were stored before or after these times, in microseconds, are none of it.
    time_min: int
    time_max: int
    #: The last message of each partition when it began: later ones are none of it. By sequence and by the times that
    #: the brokers gave the messages: this machine's clock does not say what is later. None: nothing was read yet.
    ends: dict[str, ReplayMark] | None = None
    count: int = 0
    marks: dict[str, ReplayMark] = {}
    position: SendPosition | None = None
    in_doubt: InDoubt | None = None
    finished: bool = False


class StateFile:
    """The file; ``None`` for a path keeps nothing. One process at a time has it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock: int | None = None
        if path is not None:
            self._lock = _locked(path)

    def load(self, request: dict[str, Any]) -> ReplayState | None:
        """What an earlier process left; ``InvalidArgument`` where that was another replay, or is none."""
        if self._path is None or not self._path.exists():
            return None
        try:
            state = msgspec.json.decode(self._path.read_bytes(), type=ReplayState)
        except msgspec.MsgspecError as error:
            raise InvalidArgument(f"{str(self._path)!r} is no state of a replay: {error}; name another file") from None
        if state.version > FORMAT_VERSION:
            raise InvalidArgument(f"{str(self._path)!r} is of a newer Plait; go on with that one")
        for name, value in request.items():
            if state.request.get(name) != value:
                raise InvalidArgument(
                    f"{str(self._path)!r} is of another replay: its {name} is {state.request.get(name)!r}, not "
                    f"{value!r}; name another state file, or ask for the same"
                )
        return state

    def same_cluster(self, state: ReplayState, servers: Sequence[str]) -> ReplayState:
        """With the addresses known by now; ``InvalidArgument`` where none is of the cluster that it sent to."""
        if state.servers and not set(servers) & set(state.servers):
            raise InvalidArgument(
                f"{str(self._path)!r} is of another replay: it sends to {', '.join(state.servers)}, and not to "
                f"{', '.join(servers)}; name one of those servers, or another state file"
            )
        return msgspec.structs.replace(state, servers=sorted({*state.servers, *servers}))

    def save(self, state: ReplayState) -> None:
        """Durable when this returns."""
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
        """Let others have it."""
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
        raise InvalidArgument(f"another process replays with the state file {str(path)!r}; wait for it") from None
    return lock
