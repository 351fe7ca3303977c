"""Chooses the small files of an archive that are merged into larger ones.

A log with many subjects leaves many small files, and a small file costs a lookup or a scan as much as a large one.
Consecutive files of one source, kind, subject and day are merged, oldest first, up to the size of a task. Larger files
are left alone, so that no row is rewritten more than a few times. Where a subject was deleted and created again, its
sequences restart at 0: no file has rows of two lives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Final

from plait.limits import MIB
from plait.spark.archiving.archive_tasks import CompactTask
from plait.spark.archiving.manifest import MESSAGES, ArchivedFile, ArchivedSource

#: Sizes before compression. A file of half the size of a task is large enough.
SMALL_SIZE_MAX: Final = 64 * MIB
MERGED_SIZE_MAX: Final = 128 * MIB


def compaction_tasks(files: list[ArchivedFile], sources: Mapping[str, ArchivedSource]) -> list[CompactTask]:
    """The merges for these files. No merge spans a file that is left alone, so rows keep the order of the log."""
    later_lives = _later_lives(files, sources)
    series: dict[tuple[str, str, str, str, int], list[ArchivedFile]] = {}
    for file in files:
        life = bisect_right(later_lives.get((file.source, file.kind, file.subject), []), file.start)
        series.setdefault((file.source, file.kind, file.subject, file.date, life), []).append(file)
    tasks: list[CompactTask] = []
    for members in series.values():
        taken: list[ArchivedFile] = []
        size = 0
        for file in sorted(members, key=lambda file: (file.start, file.end, file.path)):
            large = file.raw_size >= SMALL_SIZE_MAX
            if taken and (large or size + file.raw_size > MERGED_SIZE_MAX):
                tasks.append(CompactTask(tuple(taken)))
                taken, size = [], 0
            if not large:
                taken.append(file)
                size += file.raw_size
        tasks.append(CompactTask(tuple(taken)))
    return [task for task in tasks if len(task.files) > 1]


def _later_lives(
    files: list[ArchivedFile], sources: Mapping[str, ArchivedSource]
) -> dict[tuple[str, str, str], list[int]]:
    """(source, kind, subject) → the message log offsets at which later lives of its partitions begin, ascending."""
    found: dict[tuple[str, str, str], set[int]] = {}
    for file in files:
        for name in file.partitions:
            later = sources[file.source].lives.get(name, [])[1:]
            if later and file.kind == MESSAGES:
                found.setdefault((file.source, file.kind, file.subject), set()).update(life.offset for life in later)
    return {key: sorted(offsets) for key, offsets in found.items()}
