"""Which small files of an archive become larger ones.

A log with many subjects leaves many small files, each of which costs a lookup and a scan as much as a large one.
Those of one source, kind, subject and day that follow on each other in the log are merged, oldest first, up to the size
of a task; what is larger stays as it is, so that no row is written more than a few times. Where a subject was made anew
its sequences count from 0 again: no file has rows of two lives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Final

from plait.limits import MIB
from plait.spark.archiving.archive_tasks import CompactTask
from plait.spark.archiving.manifest import MESSAGES, ArchivedFile, ArchivedSource

#: Before compression. A file of half of what a task holds is large enough.
SMALL_SIZE_MAX: Final = 64 * MIB
MERGED_SIZE_MAX: Final = 128 * MIB


def compaction_tasks(files: list[ArchivedFile], sources: Mapping[str, ArchivedSource]) -> list[CompactTask]:
    """Merges that make fewer files of these. None reaches around a file that stays: rows keep the order of the log."""
    anew = _made_anew(files, sources)
    places: dict[tuple[str, str, str, str, int], list[ArchivedFile]] = {}
    for file in files:
        life = bisect_right(anew.get((file.source, file.kind, file.subject), []), file.start)
        places.setdefault((file.source, file.kind, file.subject, file.date, life), []).append(file)
    tasks: list[CompactTask] = []
    for members in places.values():
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


def _made_anew(
    files: list[ArchivedFile], sources: Mapping[str, ArchivedSource]
) -> dict[tuple[str, str, str], list[int]]:
    """(source, kind, subject) → the message-log offsets that later lives of its partitions begin behind, ascending."""
    found: dict[tuple[str, str, str], set[int]] = {}
    for file in files:
        for name in file.partitions:
            later = sources[file.source].lives.get(name, [])[1:]
            if later and file.kind == MESSAGES:
                found.setdefault((file.source, file.kind, file.subject), set()).update(life.offset for life in later)
    return {place: sorted(offsets) for place, offsets in found.items()}
