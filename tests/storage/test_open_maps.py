"""The number of mapped consume logs is bounded."""

from __future__ import annotations

from pathlib import Path

from plait.storage.disk import RealDisk
from plait.storage.logs.consume_log import DIRECTORY, ConsumeLog, OpenMaps


def flushed_log(disk: RealDisk, partition: int, maps: OpenMaps) -> ConsumeLog:
    log = ConsumeLog(disk, partition, maps)
    log.append(0, 64, 1_000, 128, 10)
    at, data = log.flush()
    log.write_records(at, data)
    log.flushed_to(at, data)
    return log


def test_the_least_recently_used_log_is_unmapped_and_mapped_again_when_needed(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    disk.make_directory(DIRECTORY)
    maps = OpenMaps(limit=3)
    logs = [flushed_log(disk, partition, maps) for partition in range(10)]
    for log in logs:
        assert log.record(0).offset == 64
    assert [log.mapped for log in logs] == [False] * 7 + [True] * 3
    assert len(maps) == 3
    assert logs[0].find(9) == 0
    assert logs[0].mapped
    assert not logs[7].mapped
