"""The partitions of an archive; the audit judges each on its own.

Several partitions may have had the same name, one after another. When a subject is deleted and created again, or gets
back a partition that was retired, the new partition starts at sequence 0 and its groups are new. An archive has the
rows of each of these *lives* of a name. Partitions without messages are judged too: their groups' events may name some.
"""

from __future__ import annotations

from dataclasses import dataclass

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
)
from plait.spark.auditing.events import merged, without
from plait.spark.inputs.archive_input import ArchivedLife, lives_of
from plait.spark.inputs.archived_events import APART
from plait.spark.inputs.audit_input import AuditedPartition
from plait.spark.inputs.coverage import Coverage
from plait.storage.reading.log_chunks import WantedRows, check_names


@dataclass(frozen=True)
class ArchivedPartition:
    """A partition as the manifest describes it."""

    facts: AuditedPartition
    files: list[ArchivedFile]
    settings: ArchivedSettings
    #: Each message that an archived event can name is archived or listed as missing.
    complete: bool


def archived_partitions(manifest: ArchiveManifest, wanted: WantedRows, place: str) -> dict[int, ArchivedPartition]:
    """The requested partitions by number: the number in the data directory, plus ``APART`` per directory before it.

    Raises ``SubjectNotFound`` for a subject that is not in the archive, and ``ArchiveError`` for an archive that has
    only copies of segments.
    """
    _check(manifest, wanted, place)
    sources = sorted(manifest.sources)
    found: dict[int, ArchivedPartition] = {}
    for (name, _, number), archived in lives_of(manifest, wanted, place).items():
        found[number + sources.index(name) * APART] = _with_files(manifest.sources[name], archived, wanted)
    for index, name in enumerate(sources):
        source = manifest.sources[name]
        for partition, settings in source.settings.items():
            number = settings.number + index * APART
            if not settings.deleted and wanted.names(settings.subject) and number not in found:
                found[number] = _without_files(source, partition, settings)
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
    check_names(place, wanted, there | {each.subject for each in settings if not each.deleted})


def _with_files(source: ArchivedSource, archived: ArchivedLife, wanted: WantedRows) -> ArchivedPartition:
    name, life = archived.partition, archived.life
    now = source.settings[name]
    current = now.number == life.number
    settings = now if current else next(each for each in source.former if each.number == life.number)
    first = min(file.partitions[name][0] for file in archived.files)
    end = max(life.end, _next(source, name, settings))
    ranges = merged(life.ranges)
    gaps = [gap for gap in source.gaps if gap.partition == name and gap.number == life.number]
    # Rows that retention removed before they were archived are not missing.
    expired = [(gap.start, gap.end) for gap in gaps if gap.expired]
    from_zero = any(not gap.start and not gap.expired for gap in gaps)
    holes = Coverage({life.number: ranges}).missing(life.number, 0 if from_zero else life.start, end)
    all_times = wanted.time_min == 0 and wanted.time_max == TIME_MAX
    readable = sum(last - first for first, last in ranges) if all_times else 0
    facts = AuditedPartition(archived.subject, name, first, end, without(holes, expired), readable)
    return ArchivedPartition(facts, archived.files, settings, current and source.has_all_of(name))


def _without_files(source: ArchivedSource, name: str, settings: ArchivedSettings) -> ArchivedPartition:
    # Rows that were removed before they were archived are neither missing nor invented.
    first, end = 0, _next(source, name, settings) if settings.whole else 0
    # The log had messages and none of them could be read.
    for life in source.lives.get(name, []):
        if life.number == settings.number:
            first, end = 0 if settings.whole else life.start, max(life.end, end)
    missing = [(first, end)] if first < end else []
    facts = AuditedPartition(settings.subject, name, first, end, missing)
    return ArchivedPartition(facts, [], settings, settings.whole and source.has_all_of(name))


def _next(source: ArchivedSource, name: str, settings: ArchivedSettings) -> int:
    """The next sequence of the archived log. 0: retention removed rows that were not archived."""
    return 0 if name in source.overtaken else settings.next
