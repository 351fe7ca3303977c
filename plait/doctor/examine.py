"""The check of a data directory, from the checkpoints to the last byte of all logs. Opens files for reading only."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from plait.doctor.checkpoint_check import examine_buckets, examine_checkpoints
from plait.doctor.consume_log_check import ConsumeCheck
from plait.doctor.findings import CheckReport, LogFacts
from plait.doctor.index_check import examine_indexes
from plait.doctor.log_checks import ActionCheck, RetainedCheck
from plait.doctor.log_walk import Walk
from plait.doctor.message_log_check import MessageCheck
from plait.doctor.meta_database_check import FILES as META
from plait.doctor.meta_database_check import SHARED, MetaCheck
from plait.errors import DataDirError
from plait.storage.checkpoint import DIRECTORY as CHECKPOINTS
from plait.storage.checkpoint import FORMAT_VERSION
from plait.storage.disk import GROUPS, LOCK, RealDisk
from plait.storage.index.index_file import DIRECTORY as INDEX
from plait.storage.logs.action_log import DIRECTORY as ACTION
from plait.storage.logs.consume_log import DIRECTORY as CONSUME
from plait.storage.logs.recovery import QUARANTINE
from plait.storage.logs.retained_log import DIRECTORY as RETAINED
from plait.storage.marks import ARCHIVED, IDENTITY, mark_path
from plait.storage.schedule.bucket import DIRECTORY as SCHEDULE

MESSAGE = "message"
OURS = {MESSAGE, RETAINED, ACTION, CHECKPOINTS, CONSUME, QUARANTINE, LOCK, SCHEDULE, INDEX}
OURS |= {mark_path(MESSAGE), mark_path(RETAINED), mark_path(ACTION), IDENTITY, ARCHIVED, GROUPS, SHARED, *META}

#: Called with the name of a step, the bytes done and the total.
OnStep = Callable[[str, int, int], None]


def examine(path: Path, on_step: OnStep) -> CheckReport:
    """Check a data directory.

    Raises ``DataDirError`` if it is not a data directory, cannot be read or has a newer format.
    """
    if not path.is_dir():
        raise DataDirError(f"{path} is not a directory; name the data directory of 'plait serve --data'")
    try:
        return _examine(path, on_step)
    except PermissionError as error:
        raise DataDirError(
            f"{path} cannot be read: {error}; run plait doctor as the user that runs the server"
        ) from None


def _examine(path: Path, on_step: OnStep) -> CheckReport:
    disk = RealDisk(path, read_only=True)
    entries = disk.list("")
    if not {MESSAGE, CHECKPOINTS} & set(entries):
        raise DataDirError(
            f"{path} is not a Plait data directory: it has neither {MESSAGE}/ nor {CHECKPOINTS}/; "
            "give another directory"
        )
    report = CheckReport(
        path=str(path),
        in_use=in_use(path),
        format_version=FORMAT_VERSION,
        message_log=LogFacts(name=MESSAGE),
        retained_log=LogFacts(name=RETAINED),
        action_log=LogFacts(name=ACTION),
    )
    newest = examine_checkpoints(disk, report) if CHECKPOINTS in entries else None
    manifest = newest.manifest if newest else None
    partitions = newest.partitions if newest else {}

    def walk(directory: str, durable: int, *, stamps_durable: bool = False) -> Walk:
        return Walk(
            disk,
            directory,
            durable=durable,
            in_use=report.in_use,
            stamps_durable=stamps_durable,
            on_progress=lambda done, total: on_step(f"{directory} log", done, total),
        )

    messages = walk(MESSAGE, manifest.message_end if manifest else 0, stamps_durable=True)
    report.message_log = messages.facts
    consume = ConsumeCheck(disk, partitions, newest.covered if newest else {}, messages.start, report)
    message_check = MessageCheck(messages, partitions, consume, report)
    message_check.run()
    consume.finish(messages.damages)
    retained = walk(RETAINED, manifest.retained_end if manifest else 0)
    report.retained_log = retained.facts
    RetainedCheck(retained, report).run()
    actions = walk(ACTION, manifest.action_end if manifest else 0)
    report.action_log = actions.facts
    ActionCheck(actions, (messages.end, retained.end), report).run()
    MetaCheck(path, message_check.catalog, report).run()
    examine_indexes(disk, MESSAGE, report)
    examine_buckets(disk, newest.buckets if newest else [], report)
    report.quarantine = [f"{QUARANTINE}/{name}" for name in disk.list(QUARANTINE)]
    for name in sorted(set(entries) - OURS):
        report.add("note", "data directory", name, "is not a file of Plait", "none", "nothing: Plait ignores it")
    for name in disk.list(GROUPS):
        what = "the data directory of another broker group of this node, which was not checked"
        advice = f"check it separately: plait doctor {disk.root / GROUPS / name}"
        report.add("note", "data directory", f"{GROUPS}/{name}", what, "none", advice)
    for each in (messages, retained, actions):
        each.close()
    return report


def in_use(path: Path) -> bool:
    """Whether a server holds the lock of the directory or of its LOCK file."""
    for locked in (path, path / LOCK):
        try:
            fd = os.open(locked, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            # A shared lock, released at once: several doctors may run at the same time.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            # Some network file systems cannot lock directories.
            continue
        finally:
            os.close(fd)
    return False
