"""Which files of an archive are merged: small ones that are adjacent in the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait.limits import MIB
from plait.spark.archiving.archive_tasks import MERGED_SIZE_MAX, SMALL_SIZE_MAX, compaction_tasks
from plait.spark.archiving.manifest import ArchivedFile, ArchivedSource, PartitionLife

#: No partition was deleted and created again.
SOURCES: dict[str, ArchivedSource] = {}


def file(start: int, raw_size: int, **fields: Any) -> ArchivedFile:
    """A file with the rows of 100 bytes of log."""
    given = {"kind": "messages", "subject": "orders", "date": "2024-05-01", "source": "g1-1", **fields}
    path = "/".join([*map(str, given.values()), str(start)])
    rest = {"count": 1, "size": 1, "crc": 0, "time_min": 0, "time_max": 0}
    return ArchivedFile(path=path, start=start, end=start + 100, raw_size=raw_size, **given, **rest)


def merged(files: Sequence[ArchivedFile]) -> list[list[int]]:
    return sorted([each.start for each in task.files] for task in compaction_tasks(list(files), SOURCES))


def test_no_merge_spans_a_file_that_stays():
    files = [file(number * 100, MIB) for number in range(7)]
    files[3] = file(300, SMALL_SIZE_MAX)
    assert merged(files) == [[0, 100, 200], [400, 500, 600]]
    assert merged(files[::-1]) == [[0, 100, 200], [400, 500, 600]]
    assert merged(files[2:5]) == []
    for kind in ("messages", "actions"):
        tasks = compaction_tasks([file(each.start, each.raw_size, kind=kind) for each in files], SOURCES)
        spans = sorted((task.files[0].start, task.files[-1].end) for task in tasks)
        assert all(end <= 300 or start >= 400 for start, end in spans)


def test_a_merge_has_one_source_kind_subject_and_day():
    others = [{"source": "g1-2"}, {"kind": "actions"}, {"subject": "refunds"}, {"date": "2024-05-02"}]
    # A large file of another source, kind, subject or day does not end a merge.
    between = [file(100, SMALL_SIZE_MAX, **fields) for fields in others]
    assert merged([file(0, 1), *between, file(200, 1)]) == [[0, 200]]
    assert merged([file(0, 1), *(file(100, 1, **fields) for fields in others)]) == []


def test_no_merge_has_rows_of_two_lives_of_a_partition():
    lives = [
        PartitionLife(number=number, offset=offset, ranges=[(0, 9)], epochs=[]) for number, offset in ((1, 0), (2, 300))
    ]
    source = ArchivedSource(group="g1", lives={"orders@g1": lives, "refunds@g1": lives[:1]})
    files = [file(start, 1, partitions={"orders@g1": (0, 9)}) for start in range(0, 600, 100)]
    others = [file(start, 1, subject="refunds", partitions={"refunds@g1": (0, 9)}) for start in range(0, 600, 100)]
    tasks = compaction_tasks([*files, *others], {"g1-1": source})
    assert [[each.start for each in task.files] for task in tasks] == [
        [0, 100, 200],
        [300, 400, 500],
        [0, 100, 200, 300, 400, 500],
    ]


def test_a_merge_is_limited_to_the_size_of_a_task():
    files = [file(number * 100, MERGED_SIZE_MAX // 4) for number in range(6)]
    assert merged(files) == [[0, 100, 200, 300], [400, 500]]
