"""The partitions of an archive; the audit judges each on its own.

Several partitions may have had the same name, one after another. When a subject is deleted and created again, or gets
back a partition that was retired, the new partition starts at sequence 0 and its groups are new. An archive has the
rows of each of these *lives* of a name. Partitions without messages are judged too: their groups' events may name some.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from plait.errors import ArchiveError
from plait.frame.header import TIME_MAX
from plait.spark.archiving.manifest import (
    ACTIONS,
    MESSAGES,
    RAW,
    ArchivedFile,
    ArchivedSettings,
    ArchivedSource,
    ArchiveManifest,
    PartitionLife,
)
from plait.spark.auditing.events import merged, without
from plait.spark.inputs.archived_events import APART
from plait.spark.inputs.audit_input import AuditedPartition
from plait.spark.inputs.coverage import Coverage
from plait.storage.reading.log_chunks import WantedRows, check_names


@dataclass(frozen=True)
class ArchivedPartition:
    """A partition as the manifest describes it."""

    source: str
    facts: AuditedPartition
    files: list[ArchivedFile]
    #: None: not known.
    settings: ArchivedSettings | None
    #: Each message that an archived event can name is archived or listed as missing.
    complete: bool

    @property
    def order(self) -> str | None:
        """The order strategy of its subject. None: not known."""
        settings = self.settings
        # Settings from an earlier version may be those of another partition of the same name.
        return None if settings is None or (not settings.number and settings.deleted) else settings.order


@dataclass
class _PartitionFiles:
    """The files with rows of a partition."""

    source: str
    subject: str
    name: str
    life: PartitionLife | None
    files: list[ArchivedFile] = field(default_factory=list)


def archived_partitions(manifest: ArchiveManifest, wanted: WantedRows, place: str) -> dict[int, ArchivedPartition]:
    """The requested partitions by number: the number in the data directory, plus ``APART`` per directory before it.

    The number is negative where an earlier version did not archive it. Raises ``SubjectNotFound`` for a subject that
    is not in the archive, and ``ArchiveError`` for an archive that has only copies of segments.
    """
    _check(manifest, wanted, place)
    sources = sorted(manifest.sources)
    known: dict[tuple[str, str, int], _PartitionFiles] = {}
    for file in manifest.find(MESSAGES):
        if wanted.names(file.subject):
            for name in file.partitions:
                life = _life_of(manifest.sources[file.source], name, file)
                key = (file.source, name, 0 if life is None else life.number)
                known.setdefault(key, _PartitionFiles(file.source, file.subject, name, life)).files.append(file)
    found: dict[int, ArchivedPartition] = {}
    for (source, _, life_number), each in sorted(known.items()):
        number = life_number + sources.index(source) * APART if life_number else -1 - len(found)
        found[number] = _with_files(manifest.sources[source], each, wanted)
    for index, source in enumerate(sources):
        for name, settings in sorted(manifest.sources[source].settings.items()):
            number = settings.number + index * APART
            if settings.number and not settings.deleted and wanted.names(settings.subject) and number not in found:
                found[number] = _without_files(source, manifest.sources[source], name, settings)
    return dict(sorted(found.items()))


def _check(manifest: ArchiveManifest, wanted: WantedRows, place: str) -> None:
    raw = [name for name, source in sorted(manifest.sources.items()) if source.raw]
    if raw and not manifest.find(MESSAGES) and not manifest.find(ACTIONS):
        raise ArchiveError(
            f"archive {place} has only copies of segments (--raw); audit them as a data directory: "
            f"--data {place}/{RAW}/{raw[0]}"
        )
    there = {file.subject for file in manifest.find(MESSAGES)}
    settings = [each for source in manifest.sources.values() for each in source.settings.values()]
    check_names(place, wanted, there | {each.subject for each in settings if each.subject and not each.deleted})


def _life_of(source: ArchivedSource, name: str, file: ArchivedFile) -> PartitionLife | None:
    """The life that a file has rows of. Files from before lives were archived belong to the first one."""
    lives = source.lives.get(name)
    if not lives:
        return None
    return lives[max(bisect_right([life.offset for life in lives], file.start) - 1, 0)]


def _with_files(source: ArchivedSource, found: _PartitionFiles, wanted: WantedRows) -> ArchivedPartition:
    name, life = found.name, found.life
    first = min(file.partitions[name][0] for file in found.files)
    end = max(file.partitions[name][1] + 1 for file in found.files)
    now = source.settings.get(name)
    if life is None:
        facts = AuditedPartition(found.subject, name, first, end, [])
        return ArchivedPartition(found.source, facts, found.files, now, complete=False)
    is_last = life is source.lives[name][-1]
    current = now is not None and (now.number == life.number or (not now.number and is_last))
    former = next((each for each in source.former if each.number == life.number), None)
    settings = now if current else former
    end = max(end, life.end, _next(source, name, settings))
    ranges = merged(life.ranges)
    gaps = [gap for gap in source.gaps if gap.partition == name and gap.number in (0, life.number)]
    # Rows that retention removed before they were archived are not missing.
    expired = [(gap.start, gap.end) for gap in gaps if gap.expired]
    from_zero = any(gap.number and not gap.start and not gap.expired for gap in gaps)
    holes = Coverage({life.number: ranges}).missing(life.number, 0 if from_zero else life.start, end)
    all_times = wanted.time_min == 0 and wanted.time_max == TIME_MAX
    readable = sum(last - first for first, last in ranges) if all_times else 0
    facts = AuditedPartition(found.subject, name, first, end, without(holes, expired), readable)
    return ArchivedPartition(found.source, facts, found.files, settings, current and source.has_all_of(name))


def _without_files(source: str, facts: ArchivedSource, name: str, settings: ArchivedSettings) -> ArchivedPartition:
    # Rows that were removed before they were archived are neither missing nor invented.
    first, end = 0, _next(facts, name, settings) if settings.whole else 0
    # The log had messages and none of them could be read.
    for life in facts.lives.get(name, []):
        if life.number == settings.number:
            first, end = 0 if settings.whole else life.start, max(life.end, end)
    missing = [(first, end)] if first < end else []
    partition = AuditedPartition(settings.subject, name, first, end, missing)
    return ArchivedPartition(source, partition, [], settings, settings.whole and facts.has_all_of(name))


def _next(source: ArchivedSource, name: str, settings: ArchivedSettings | None) -> int:
    """The next sequence of the archived log. 0: not known, or retention removed rows that were not archived."""
    return 0 if settings is None or name in source.overtaken else settings.next
