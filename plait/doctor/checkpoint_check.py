"""Every checkpoint: whole or not, and the newest one that is."""

from __future__ import annotations

import msgspec

from plait.broker.recovery.shards import SHARD_PREFIX as PARTITIONS_PREFIX
from plait.broker.recovery.shards import PartitionState, decode_partitions
from plait.doctor.findings import CheckpointFacts, CheckReport, Finding
from plait.model.names import counted
from plait.storage.checkpoint import DIRECTORY, CheckpointManifest, Checkpoints
from plait.storage.disk import RealDisk
from plait.storage.schedule.bucket import SHARD_PREFIX

PART = "checkpoint"


class Newest(msgspec.Struct):
    """The checkpoint that a start would use."""

    manifest: CheckpointManifest
    partitions: dict[int, PartitionState]
    #: Partition → its state and its consume log have the frames before this offset of the message log.
    covered: dict[int, int]
    #: Shards of buckets.
    buckets: list[bytes]


def examine_checkpoints(disk: RealDisk, report: CheckReport) -> Newest | None:
    """Read every checkpoint back. A newer format is refused with ``DataDirError``."""
    newest: Newest | None = None
    names = [name for name in disk.list(DIRECTORY) if name.startswith("manifest-") and "." not in name]
    needed: set[str] = set()
    for name in reversed(names):
        path = f"{DIRECTORY}/{name}"
        read, problem = _read(disk, name)
        manifest = read.manifest if read else None
        if problem and report.in_use and not disk.exists(path):
            # The server made a new one meanwhile and let the oldest go.
            continue
        if manifest is not None:
            needed.update(where.file for where in manifest.shards.values())
        report.checkpoints.append(_facts(path, manifest, whole=not problem))
        if problem:
            report.add(
                Finding(
                    severity="damaged",
                    part=PART,
                    file=path,
                    what=problem,
                    harm=_harm(newest is not None, len(names)),
                    advice="check the disk; the next start goes on from another one, or from the logs",
                )
            )
        elif newest is None:
            newest = read
    if not report.in_use:
        _note_leftovers(disk, needed, report)
    return newest


def _read(disk: RealDisk, name: str) -> tuple[Newest | None, str]:
    """One checkpoint as far as it can be read, and what is wrong with it."""
    one = Checkpoints(_OneManifest(disk, name))
    try:
        loaded = one.load()
    except FileNotFoundError:
        return None, "is gone"
    if loaded is None:
        return None, one.rejected[-1].split(": ", 1)[-1] if one.rejected else "does not read back whole"
    found = Newest(loaded.manifest, {}, {}, [])
    for name, data in loaded.shards.items():
        if name.startswith(PARTITIONS_PREFIX):
            try:
                shard = decode_partitions(data)
            except msgspec.MsgspecError as error:
                return found, f"shard {name} does not decode: {error}"
            for entry in shard.partitions:
                found.partitions[entry.row.id] = entry
                # A shard that was not copied again had no changes when the checkpoint began.
                found.covered[entry.row.id] = max(shard.position.message, loaded.manifest.message_offset)
        elif name.startswith(SHARD_PREFIX):
            found.buckets.append(data)
    return found, ""


class _OneManifest(RealDisk):
    """A disk on which one manifest is all there is, so that nothing falls back to another."""

    def __init__(self, disk: RealDisk, manifest: str) -> None:
        super().__init__(disk.root, read_only=True)
        self._manifest = manifest

    def list(self, path: str) -> list[str]:
        return [self._manifest] if path == DIRECTORY else super().list(path)


def _facts(path: str, manifest: CheckpointManifest | None, *, whole: bool) -> CheckpointFacts:
    if manifest is None:
        return CheckpointFacts(file=path, whole=False)
    return CheckpointFacts(
        file=path,
        whole=whole,
        number=manifest.number,
        clean=manifest.clean,
        time=manifest.time,
        epoch=manifest.epoch,
        message_offset=manifest.message_offset,
        action_offset=manifest.action_offset,
        shards=len(manifest.shards),
    )


def _harm(newer_is_whole: bool, count: int) -> str:
    if newer_is_whole:
        return "none: a newer checkpoint is whole"
    if count > 1:
        return "a start has to go back to an older checkpoint and reads more of the logs; nothing is lost by that"
    return "a start has to read the logs from their beginning; what was deleted from them is not known any more"


def _note_leftovers(disk: RealDisk, needed: set[str], report: CheckReport) -> None:
    known = needed | {facts.file.removeprefix(f"{DIRECTORY}/") for facts in report.checkpoints}
    left = [name for name in disk.list(DIRECTORY) if name not in known]
    # Shards of a checkpoint that does not read back are nobody's either.
    if left and all(facts.whole for facts in report.checkpoints):
        report.add(
            Finding(
                severity="note",
                part=PART,
                file=f"{DIRECTORY}/{left[0]}",
                what=f"{counted(len(left), 'file')} of no checkpoint: one was being written when the server stopped",
                harm="none",
                advice="nothing: the next checkpoint clears them away",
            )
        )
