"""Delayed messages: every run of every bucket that the newest checkpoint names, as far as it waits."""

from __future__ import annotations

from plait.doctor.findings import CheckReport, Finding
from plait.storage.disk import RealDisk
from plait.storage.schedule.bucket import Bucket, decode_bucket

PART = "schedule"


def examine_buckets(disk: RealDisk, shards: list[bytes], report: CheckReport) -> None:
    """Read all runs that have rows left."""
    for data in shards:
        state = decode_bucket(data)
        if report.in_use and not disk.exists(state.path):
            # It was finished and let go meanwhile.
            continue

        def tell(file: str, reason: str, rows: int) -> None:
            report.missing_messages += rows
            report.add(
                Finding(
                    severity="damaged",
                    part=PART,
                    file=file,
                    what=reason,
                    harm=f"{rows} delayed messages cannot be delivered",
                    advice="restore this file from a copy while the server is stopped; "
                    "without one the server goes on and skips them",
                )
            )

        bucket = Bucket.load(disk, tell, data)
        try:
            for run in range(len(bucket.runs)):
                bucket.open_run(run)
        except OSError as error:
            tell(state.path, f"it cannot be read: {error.strerror}", bucket.waiting)
        else:
            report.scheduled += bucket.waiting
