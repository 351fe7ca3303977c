"""Checkpoints: atomic snapshots of derived state, with the offsets up to which the first-hand logs are applied.

State is divided into shards. A checkpoint writes only the shards that changed (R1), and a manifest with the file, size
and checksum of every shard. The manifest comes last: it is written, synced and renamed, and its directory is synced.
Until then the previous checkpoint is the valid one. The last five checkpoints are kept. If the newest checkpoint is not
readable in full, recovery uses the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec
from crc32c import crc32c

from plait.errors import DataDirError
from plait.storage.disk import Disk
from plait.storage.marks import replace_file, write_file

DIRECTORY = "checkpoints"
KEEP = 5
FORMAT_VERSION = 1
_MAGIC = b"PLCK"


class ShardFile(msgspec.Struct, frozen=True):
    """The file of a shard, its size and its checksum."""

    file: str
    size: int
    crc: int


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint. Its shards are copied one after another, while the logs grow."""

    version: int = FORMAT_VERSION
    number: int
    #: The state contains everything before these offsets; recovery reads the logs from here.
    message_offset: int = 0
    action_offset: int = 0
    retained_offset: int = 0
    #: The ends of the logs when the last shard was copied: the state contains nothing after them, and everything before
    #: them is durable.
    message_end: int = 0
    action_end: int = 0
    retained_end: int = 0
    epoch: int = 0
    #: The state contains all action frames with a lower number, whatever their offset.
    action_index: int = 0
    #: True if an orderly stop wrote the checkpoint. If nothing follows in the logs, the next start continues its data
    #: epoch.
    clean: bool = False
    time: int = 0
    next_partition: int = 1
    next_group: int = 1
    next_consumer: int = 1
    #: The offset of the first unbucketed row in the message log; None: there is none before ``message_offset``.
    unbucketed_offset: int | None = None
    shards: dict[str, ShardFile] = {}
    #: The offset of the first half message in the message log that is not decided; None: there is none.
    transactions_offset: int | None = None

    @property
    def message_needed(self) -> int:
        """The message log is needed from this offset to recover from this checkpoint."""
        offsets = (self.message_offset, self.unbucketed_offset, self.transactions_offset)
        return min(offset for offset in offsets if offset is not None)


class LoadedCheckpoint(msgspec.Struct):
    """A checkpoint with its shards, all verified."""

    manifest: CheckpointManifest
    shards: dict[str, bytes]


class Checkpoints:
    """The checkpoints of one data directory."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        disk.make_directory(DIRECTORY)
        self._kept: list[CheckpointManifest] = []
        self.last: CheckpointManifest | None = None
        #: Checkpoints that could not be read, with the reason.
        self.rejected: list[str] = []
        #: (number of the last checkpoint that may use the file, path) of replaced files.
        self._replaced: list[tuple[int, str]] = []

    def load(self) -> LoadedCheckpoint | None:
        """The newest checkpoint that is readable in full, or None: the state is then rebuilt from the logs.

        ``DataDirError`` for another format version; nothing is changed then.
        """
        result: LoadedCheckpoint | None = None
        for name in reversed(self._names()):
            path = f"{DIRECTORY}/{name}"
            manifest = self._read_manifest(path)
            if manifest is None:
                self.rejected.append(f"{path}: not readable in full")
                continue
            if result is not None:
                self._kept.insert(0, manifest)
                continue
            shards: dict[str, bytes] = {}
            for shard, where in manifest.shards.items():
                data = self._read_shard(where)
                if data is None:
                    self.rejected.append(f"{path}: shard {shard} is not readable in full")
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
            if version != FORMAT_VERSION:
                # The logs are readable, but some state is only in the checkpoint.
                raise DataDirError(
                    f"{path} has format version {version}, this Plait reads only version {FORMAT_VERSION}; "
                    "use the Plait that wrote it (nothing was changed)"
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
        """Write a checkpoint: the shards of the last one, with ``changed`` replaced and ``dropped`` removed.

        Blocks until the checkpoint is durable.
        """
        shards = dict(self.last.shards) if self.last else {}
        for shard in dropped:
            shards.pop(shard, None)
        for shard, data in changed.items():
            name = f"shard-{shard}-{manifest.number:012d}"
            write_file(self.disk, f"{DIRECTORY}/{name}", data)
            shards[shard] = ShardFile(name, len(data), crc32c(data))
        manifest = msgspec.structs.replace(manifest, shards=shards)
        body = msgspec.msgpack.encode(manifest)
        # The names of the shard files must be durable before the manifest that refers to them exists.
        self.disk.sync_directory(DIRECTORY)
        target = f"{DIRECTORY}/manifest-{manifest.number:012d}"
        replace_file(self.disk, target, _MAGIC + crc32c(body).to_bytes(4, "little") + body)
        self.last = manifest
        self._kept.append(manifest)
        self._prune()
        return manifest

    def _prune(self) -> None:
        self._kept = self._kept[-KEEP:]
        wanted = {f"manifest-{m.number:012d}" for m in self._kept}
        wanted.update(where.file for m in self._kept for where in m.shards.values())
        for name in self.disk.list(DIRECTORY):
            if name not in wanted:
                self.disk.remove(f"{DIRECTORY}/{name}")

    def replaced(self, path: str) -> None:
        """Record that the broker no longer uses a consume log or bucket file, which checkpoints may still refer to."""
        self._replaced.append((self.last.number if self.last else 0, path))

    def unneeded(self, number: int, in_use: Callable[[str], bool]) -> list[str]:
        """The replaced files that none of the kept checkpoints needs, when ``number`` is the newest checkpoint."""
        # After a failed checkpoint, a replaced file may be in use again under the same name.
        replaced = [(after, path) for after, path in self._replaced if not in_use(path)]
        self._replaced = [(after, path) for after, path in replaced if number <= after + KEEP]
        return [path for after, path in replaced if number > after + KEEP]

    @property
    def oldest(self) -> CheckpointManifest | None:
        """The oldest checkpoint that is kept: the first-hand logs are needed from its offsets (R21)."""
        return self._kept[0] if self._kept else None

    @property
    def message_needed(self) -> int:
        """The message log is needed from this offset to recover from any checkpoint that is kept."""
        return min((manifest.message_needed for manifest in self._kept), default=0)


class _Version(msgspec.Struct):
    version: int
