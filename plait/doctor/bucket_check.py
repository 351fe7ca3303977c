"""Checks delayed messages: every run with waiting rows, of every bucket in the newest checkpoint."""

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
            # The server finished and removed it since the checkpoint.
            continue

        def add_damage(file: str, reason: str, rows: int) -> None:
            report.missing_messages += rows
            report.add(
                Finding(
                    severity="damaged",
                    part=PART,
                    file=file,
                    what=reason,
                    harm=f"{rows} delayed messages cannot be delivered",
                    advice="restore this file from a copy while the server is stopped; "
                    "without a copy the server skips them",
                )
            )

        bucket = Bucket.load(disk, add_damage, data)
        try:
            for run in range(len(bucket.runs)):
                bucket.open_run(run)
        except OSError as error:
            add_damage(state.path, f"cannot be read: {error.strerror}", bucket.waiting)
        else:
            report.scheduled += bucket.waiting
