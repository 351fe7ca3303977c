"""Checks every checkpoint, finds the newest one that is whole, and checks its buckets of delayed messages."""

from __future__ import annotations

import msgspec

from plait.broker.recovery.shards import SHARD_PREFIX as PARTITIONS_PREFIX
from plait.broker.recovery.shards import PartitionShard, PartitionState
from plait.doctor.findings import CheckpointFacts, CheckReport
from plait.doctor.log_checks import RESTORE
from plait.model.names import counted
from plait.storage.checkpoint import DIRECTORY, CheckpointManifest, Checkpoints
from plait.storage.disk import RealDisk
from plait.storage.schedule.bucket import SHARD_PREFIX, Bucket

PART = "checkpoint"


class Newest(msgspec.Struct):
    """The checkpoint that a start would use."""

    manifest: CheckpointManifest
    partitions: dict[int, PartitionState]
    #: Partition → the offset of the message log up to which its state and its consume log have all frames.
    covered: dict[int, int]
    #: The shards of buckets.
    buckets: list[bytes]


def examine_checkpoints(disk: RealDisk, report: CheckReport) -> Newest | None:
    """Read every checkpoint. Raises ``DataDirError`` for a newer format."""
    newest: Newest | None = None
    names = [name for name in disk.list(DIRECTORY) if name.startswith("manifest-") and "." not in name]
    needed: set[str] = set()
    for name in reversed(names):
        path = f"{DIRECTORY}/{name}"
        read, problem = _read(disk, name)
        manifest = read.manifest if read else None
        if problem and report.in_use and not disk.exists(path):
            # The server has written a new checkpoint and removed the oldest.
            continue
        if manifest is not None:
            needed.update(where.file for where in manifest.shards.values())
        report.checkpoints.append(_facts(path, manifest, whole=not problem))
        if problem:
            advice = "check the disk; the next start uses another checkpoint, or the logs"
            report.add("damaged", PART, path, problem, _harm(newest is not None, len(names)), advice)
        elif newest is None:
            newest = read
    if not report.in_use:
        _note_leftovers(disk, needed, report)
    return newest


def _read(disk: RealDisk, name: str) -> tuple[Newest | None, str]:
    """One checkpoint, where it can be read, and the problem with it (empty: none)."""
    one = Checkpoints(_OneManifest(disk, name))
    try:
        loaded = one.load()
    except FileNotFoundError:
        return None, "is gone"
    if loaded is None:
        return None, one.rejected[-1].split(": ", 1)[-1] if one.rejected else "not readable in full"
    found = Newest(loaded.manifest, {}, {}, [])
    for name, data in loaded.shards.items():
        if name.startswith(PARTITIONS_PREFIX):
            try:
                shard = msgspec.msgpack.decode(data, type=PartitionShard)
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
    """A disk with one manifest only, so that loading does not fall back to another checkpoint."""

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
        return "none is lost: a start uses an older checkpoint and reads more of the logs"
    return "a start reads the logs from their beginning; state of removed segments is lost"


def _note_leftovers(disk: RealDisk, needed: set[str], report: CheckReport) -> None:
    known = needed | {facts.file.removeprefix(f"{DIRECTORY}/") for facts in report.checkpoints}
    left = [name for name in disk.list(DIRECTORY) if name not in known]
    # Shards of a damaged checkpoint would look like leftovers too.
    if left and all(facts.whole for facts in report.checkpoints):
        what = f"{counted(len(left), 'file')} of no checkpoint: the server stopped while it wrote one"
        report.add("note", PART, f"{DIRECTORY}/{left[0]}", what, "none", "nothing: the next checkpoint removes them")


def examine_buckets(disk: RealDisk, shards: list[bytes], report: CheckReport) -> None:
    """Read every run with waiting rows, of all buckets."""
    for data in shards:

        def add_damage(file: str, reason: str, rows: int) -> None:
            report.missing_messages += rows
            harm = f"{rows} delayed messages cannot be delivered"
            report.add("damaged", "schedule", file, reason, harm, RESTORE + "them")

        bucket = Bucket.load(disk, add_damage, data)
        if report.in_use and not disk.exists(bucket.path):
            # The server finished and removed it since the checkpoint.
            continue
        try:
            for run in range(len(bucket.runs)):
                bucket.open_run(run)
        except OSError as error:
            add_damage(bucket.path, f"cannot be read: {error.strerror}", bucket.waiting)
        else:
            report.scheduled += bucket.waiting
