"""Checkpoints: atomic snapshots of derived state, and how far the first-hand logs are applied in it.

State is divided into shards; a checkpoint writes only the shards that changed (R1) and a manifest that names the file,
size and checksum of every shard. The manifest is written, synced, renamed and its directory synced, last: until then
the one before counts. The last five are kept, and one that does not read back whole falls back to the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from crc32c import crc32c

from plait.errors import DataDirError
from plait.storage.disk import Disk

DIRECTORY = "checkpoints"
KEEP = 5
FORMAT_VERSION = 4
_MAGIC = b"PLCK"


class ShardFile(msgspec.Struct, frozen=True):
    """Where a shard's bytes are."""

    file: str
    size: int
    crc: int


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint. Its shards were copied one after another, while the logs grew."""

    version: int = FORMAT_VERSION
    number: int
    #: Everything before these offsets is in the state, and recovery reads the logs from here on.
    message_offset: int
    action_offset: int
    kept_offset: int = 0
    #: Where the logs ended when the last shard was copied: nothing behind is in the state, and all before was durable.
    message_end: int
    action_end: int
    kept_end: int = 0
    epoch: int
    #: Action frames with a lower number are in the state, wherever they stand.
    action_index: int
    #: Written by an orderly stop: if nothing follows in the logs, the epoch goes on.
    clean: bool
    time: int
    next_partition: int
    next_group: int
    next_consumer: int
    #: Delayed rows that no bucket holds are in the message log from here on; None: there are none before its offset.
    unfiled_offset: int | None = None
    shards: dict[str, ShardFile]

    @property
    def message_needed(self) -> int:
        """The message log is needed from here on, to go on from this checkpoint."""
        return self.message_offset if self.unfiled_offset is None else min(self.message_offset, self.unfiled_offset)


class LoadedCheckpoint(msgspec.Struct):
    """A checkpoint read back whole."""

    manifest: CheckpointManifest
    shards: dict[str, bytes]


class Checkpoints:
    """The checkpoints of one data directory."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        disk.make_directory(DIRECTORY)
        self._kept: list[CheckpointManifest] = []
        self.last: CheckpointManifest | None = None
        #: Checkpoints that did not read back, and why.
        self.rejected: list[str] = []

    def load(self) -> LoadedCheckpoint | None:
        """The newest one that is whole; None: rebuild from the logs. Another format is refused untouched."""
        result: LoadedCheckpoint | None = None
        for name in reversed(self._names()):
            path = f"{DIRECTORY}/{name}"
            manifest = self._read_manifest(path)
            if manifest is None:
                self.rejected.append(f"{path}: does not read back whole")
                continue
            if result is not None:
                self._kept.insert(0, manifest)
                continue
            shards: dict[str, bytes] = {}
            for shard, where in manifest.shards.items():
                data = self._read_shard(where)
                if data is None:
                    self.rejected.append(f"{path}: shard {shard} does not read back whole")
                    break
                shards[shard] = data
            else:
                result = LoadedCheckpoint(manifest, shards)
                self._kept.insert(0, manifest)
                self.last = manifest
        return result

    def _names(self) -> list[str]:
        return [name for name in self.disk.list(DIRECTORY) if name.startswith("manifest-") and "." not in name]

    def _read_manifest(self, path: str) -> CheckpointManifest | None:
        data = self.disk.read(path)
        if len(data) < 8 or data[:4] != _MAGIC or crc32c(data[8:]) != int.from_bytes(data[4:8], "little"):
            return None
        try:
            version = msgspec.msgpack.decode(data[8:], type=_Version).version
            if version > FORMAT_VERSION:
                raise DataDirError(
                    f"{path} has format version {version}, this Plait reads up to {FORMAT_VERSION}; "
                    "use the newer Plait that wrote it (nothing was touched)"
                )
            if version < FORMAT_VERSION:
                # Its logs could be read, but not what the checkpoint alone knows.
                raise DataDirError(
                    f"{path} has format version {version}, this Plait reads version {FORMAT_VERSION} alone; "
                    "use the Plait that wrote it (nothing was touched)"
                )
            return msgspec.msgpack.decode(data[8:], type=CheckpointManifest)
        except msgspec.MsgspecError:
            return None

    def _read_shard(self, where: ShardFile) -> bytes | None:
        path = f"{DIRECTORY}/{where.file}"
        if not self.disk.exists(path):
            return None
        data = self.disk.read(path)
        return data if len(data) == where.size and crc32c(data) == where.crc else None

    def write(
        self, manifest: CheckpointManifest, changed: Mapping[str, bytes], dropped: Iterable[str] = ()
    ) -> CheckpointManifest:
        """Make a checkpoint of the last one's shards with ``changed`` ones replaced. Blocks until durable."""
        shards = dict(self.last.shards) if self.last else {}
        for shard in dropped:
            shards.pop(shard, None)
        for shard, data in changed.items():
            name = f"shard-{shard}-{manifest.number:012d}"
            self._write_file(name, data)
            shards[shard] = ShardFile(name, len(data), crc32c(data))
        manifest = msgspec.structs.replace(manifest, shards=shards)
        body = msgspec.msgpack.encode(manifest)
        target = f"manifest-{manifest.number:012d}"
        self._write_file(f"{target}.new", _MAGIC + crc32c(body).to_bytes(4, "little") + body)
        # The shards' names must be certain before the manifest that needs them can appear.
        self.disk.sync_directory(DIRECTORY)
        self.disk.rename(f"{DIRECTORY}/{target}.new", f"{DIRECTORY}/{target}")
        self.disk.sync_directory(DIRECTORY)
        self.last = manifest
        self._kept.append(manifest)
        self._prune()
        return manifest

    def _write_file(self, name: str, data: bytes) -> None:
        file = self.disk.open(f"{DIRECTORY}/{name}", create=True)
        try:
            file.truncate(0)
            file.write([data], 0)
            file.sync()
        finally:
            file.close()

    def _prune(self) -> None:
        self._kept = self._kept[-KEEP:]
        wanted = {f"manifest-{m.number:012d}" for m in self._kept}
        wanted.update(where.file for m in self._kept for where in m.shards.values())
        for name in self.disk.list(DIRECTORY):
            if name not in wanted:
                self.disk.remove(f"{DIRECTORY}/{name}")

    @property
    def oldest(self) -> CheckpointManifest | None:
        """The oldest one kept: the first-hand logs are needed from here on (R21)."""
        return self._kept[0] if self._kept else None

    @property
    def message_needed(self) -> int:
        """The message log is needed from here on, whichever of those kept has to serve."""
        return min((manifest.message_needed for manifest in self._kept), default=0)


class _Version(msgspec.Struct):
    version: int
