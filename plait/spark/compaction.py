"""Which small files of an archive become larger ones.

A log with many subjects leaves many small files, each of which costs a lookup and a scan as much as a large one.
Those of one source, kind, subject and day are merged, oldest first, up to the size of a task; what is larger stays as
it is, so that no row is written more than a few times.
"""

from __future__ import annotations

from typing import Final

from plait.limits import MIB
from plait.spark.manifest import ArchivedFile
from plait.spark.tasks import CompactTask

#: Before compression. A file of half of what a task holds is large enough.
SMALL_SIZE_MAX: Final = 64 * MIB
MERGED_SIZE_MAX: Final = 128 * MIB


def compaction_tasks(files: list[ArchivedFile]) -> list[CompactTask]:
    """Merges that make fewer files of these."""
    places: dict[tuple[str, str, str, str], list[ArchivedFile]] = {}
    for file in files:
        if file.raw_size < SMALL_SIZE_MAX:
            places.setdefault((file.source, file.kind, file.subject, file.date), []).append(file)
    tasks: list[CompactTask] = []
    for small in places.values():
        taken: list[ArchivedFile] = []
        size = 0
        for file in sorted(small, key=lambda file: (file.start, file.path)):
            if taken and size + file.raw_size > MERGED_SIZE_MAX:
                tasks.append(CompactTask(tuple(taken)))
                taken, size = [], 0
            taken.append(file)
            size += file.raw_size
        tasks.append(CompactTask(tuple(taken)))
    return [task for task in tasks if len(task.files) > 1]
