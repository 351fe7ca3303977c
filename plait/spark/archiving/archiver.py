"""``plait.spark.archive``: bring an archive up to date with a data directory.

A run reads the first-hand logs from the offsets that the manifest records, splits the new part into tasks, runs them on
Spark, compares the written rows with the frame headers of the log, and commits a manifest. Then it writes the archive
mark into the data directory, which retention may wait for, and removes files that no manifest names any more.

Promise: whenever and however a run ends, each message and event is in the archive once, or not yet.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
from pyarrow import fs

from plait import chance
from plait.clock import Clock, SystemClock
from plait.errors import DamageError, DataDirError, InvalidArgument
from plait.model import names
from plait.spark.archiving.archive_round import copied, settled
from plait.spark.archiving.archive_tasks import ArchiveTask, CompactTask, Job, TaskFacts, VerifyTask, compaction_tasks
from plait.spark.archiving.intake import Intake
from plait.spark.archiving.manifest import (
    ACTIONS,
    DEATHS,
    MESSAGES,
    RAW,
    Archive,
    ArchivedFile,
    ArchivedSource,
    ArchiveManifest,
    RawSegment,
    source_id,
)
from plait.spark.runtime.job_runner import ProgressListener, run_job
from plait.storage.disk import RealDisk
from plait.storage.marks import ArchiveMark, identity, write_archived
from plait.storage.reading.log_chunks import WantedRows
from plait.storage.reading.log_reader import LEAVE_OUT, MESSAGE_DIRECTORY

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("plait.spark")

#: The maximum of files that one verify task reads back: a task costs more than its entries do.
VERIFY_FILES_MAX: Final = 50

#: The name of a file that an archiver wrote: manifest number, token of the writer, counter.
_OURS: Final = re.compile(r"(\d{20})-[0-9a-f]{16}-\d+\..+")


class ArchiveReport(msgspec.Struct, kw_only=True):
    """The result of a run."""

    archive: str
    #: The number of the newest manifest; 0: there is no archive yet.
    manifest: int = 0
    messages: int = 0
    events: int = 0
    #: Deaths of messages, with their reasons.
    deaths: int = 0
    #: Files that the run wrote, and their bytes.
    files: int = 0
    size: int = 0
    #: Bytes of the logs that these files were made from.
    log_size: int = 0
    segments: int = 0
    #: Files that compaction replaced, files that were read back, and files that no manifest named and were removed.
    merged: int = 0
    verified: int = 0
    removed: int = 0
    #: New gaps in sequences, and new damaged ranges that were left out.
    gaps: int = 0
    left_out: int = 0
    seconds: float = 0.0


def archive(
    data: str | os.PathLike[str] | None,
    to: str | os.PathLike[str],
    *,
    spark: SparkSession | None = None,
    master: str | None = None,
    group: str = "g1",
    subjects: Sequence[str] = (),
    now: bool = False,
    raw: bool = False,
    compact: bool = False,
    verify: bool = False,
    skip_damage: bool = False,
    progress: ProgressListener | None = None,
) -> ArchiveReport:
    """Archive the new part of a data directory, which may be in use, as Parquet files below ``to``.

    Archives full segments by default, everything up to the end of the log with ``now``, and copies of segment files
    with ``raw``. Without ``data`` it only compacts and verifies the archive. Starts a session on ``master`` if there is
    work to do and ``spark`` is not given.
    """
    run = Archiver(to, spark=spark, master=master, progress=progress)
    if data is not None:
        try:
            run.take_in(os.fspath(data), group=group, subjects=subjects, now=now, raw=raw, skip_damage=skip_damage)
        except DamageError as error:
            # The message names the option of a reader: replace it by the option of the archiver.
            raise DamageError(error.message.replace(LEAVE_OUT, "--skip-damage"), **error.details) from error
    elif not compact and not verify:
        raise InvalidArgument("nothing to do: give a data directory, or compact or verify")
    if compact:
        run.compact()
    if verify:
        run.verify()
    return run.end()


class Archiver:
    """One run on one archive."""

    def __init__(
        self,
        to: str | os.PathLike[str],
        *,
        spark: SparkSession | None = None,
        master: str | None = None,
        progress: ProgressListener | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._archive = Archive.at(to)
        self._spark = spark
        self._master = master
        self._progress = progress
        self._clock = clock or SystemClock()
        self._begun = self._clock.monotonic()
        self._manifest = self._archive.load()
        self.report = ArchiveReport(archive=self._archive.location, manifest=self._manifest.number)

    # --- the steps ------------------------------------------------------------------------------

    def take_in(
        self,
        data: str,
        *,
        group: str = "g1",
        subjects: Sequence[str] = (),
        now: bool = False,
        raw: bool = False,
        skip_damage: bool = False,
    ) -> None:
        """Archive the new part of a data directory."""
        wanted = WantedRows.of_subjects(subjects or ("*",))
        if raw and (now or subjects):
            other = "everything up to now" if now else "some subjects"
            raise InvalidArgument(f"whole segments and {other} exclude each other: leave out --raw or the other option")
        if not os.path.isdir(os.path.join(data, MESSAGE_DIRECTORY)):
            raise DataDirError(
                f"{data!r} is not a Plait data directory: it has no {MESSAGE_DIRECTORY!r} directory. Give the "
                "directory of 'plait serve --data'"
            )
        data, disk = os.path.abspath(data), RealDisk(data)
        name, source = self._source(data, names.check("group", group), _identity(data, disk), subjects)
        intake = Intake(data, group, source, now=now, fail_on_damage=not skip_damage)
        rounds = intake.raw_rounds(name) if raw else intake.rounds(wanted)
        for number, each in enumerate(rounds, 1):
            step = f"archiving {'segments' if raw else 'messages and events'}"
            facts = self._run(name, each.tasks, step if len(rounds) == 1 else f"{step}, {number} of {len(rounds)}")
            before = source
            source = copied(source, each, facts) if raw else settled(source, each, facts, group)
            self._commit({name: source}, [file for fact in facts for file in fact.files], [])
            self._count(facts, before, source)
            # After each round, so that retention can free a nearly full disk before the last round is done.
            self._write_mark(data, disk, source)
        if not rounds:
            # An earlier run may have ended between its commit and this step.
            self._write_mark(data, disk, source)

    def compact(self) -> None:
        """Merge small files into large ones. The replaced files are removed with the next commit after this one."""
        by_source: dict[str, list[CompactTask]] = {}
        for task in compaction_tasks(self._manifest.files, self._manifest.sources):
            by_source.setdefault(task.files[0].source, []).append(task)
        for source, merges in by_source.items():
            facts = self._run(source, merges, "merging small files")
            old = [file for task in merges for file in task.files]
            new = [file for fact in facts for file in fact.files]
            self._commit({}, new, old)
            self.report.merged += len(old)
            self.report.files += len(new)
            self.report.size += sum(file.size for file in new)

    def verify(self) -> None:
        """Read every file and compare it with the manifest; ``ArchiveError`` names the first file that differs."""
        files: list[ArchivedFile | RawSegment] = [*self._archive.open().files]
        files += [segment for source in self._manifest.sources.values() for segment in source.raw]
        # Each task gets large and small files, so that tasks take about the same time.
        files.sort(key=lambda file: file.size, reverse=True)
        count = max(-(-len(files) // VERIFY_FILES_MAX), min(len(files), 2 * (os.cpu_count() or 1)))
        self._run("", [VerifyTask(tuple(files[index::count])) for index in range(count)], "reading the archive back")
        self.report.verified = len(files)

    def end(self) -> ArchiveReport:
        """Remove files that no manifest names, and return the report."""
        self._clean()
        self.report.manifest = self._manifest.number
        self.report.seconds = self._clock.monotonic() - self._begun
        return self.report

    # --- details --------------------------------------------------------------------------------

    def _write_mark(self, data: str, disk: RealDisk, source: ArchivedSource) -> None:
        """Write the archive mark: up to which offsets all subjects of the data directory are archived."""
        if not source.whole or not self._is_newest():
            return
        reached = ArchiveMark(
            max(source.message_offset, source.raw_message_offset),
            max(source.action_offset, source.raw_action_offset),
            self._archive.address,
            self._manifest.number,
            max(source.retained_offset, source.raw_retained_offset),
        )
        try:
            write_archived(disk, reached)
        except OSError as error:
            log.warning(
                "%s is archived, but its archive mark cannot be written (%s): a server with --archive-before-delete "
                "deletes nothing until a run writes it",
                data,
                error,
            )

    def _source(self, data: str, group: str, directory: str, subjects: Sequence[str]) -> tuple[str, ArchivedSource]:
        """The manifest's entry for a data directory, or a new one."""
        name = source_id(group, directory)
        for other, source in self._manifest.sources.items():
            if other != name and other == source_id(source.group, directory):
                raise InvalidArgument(
                    f"{data} is in this archive as group {source.group!r}: use --group {source.group}, or another "
                    "archive"
                )
        requested = sorted(set(subjects)) if "*" not in subjects else []
        source = self._manifest.sources.get(name) or ArchivedSource(group=group, subjects=requested)
        if source.subjects != requested:
            shown = [", ".join(each) or "all" for each in (source.subjects, requested)]
            raise InvalidArgument(
                f"this archive has the subjects {shown[0]} of {data}, and this run asks for {shown[1]}: an archive "
                "cannot add subjects from a part of the log that it has passed. Give the same subjects, or use another "
                "archive"
            )
        return name, source

    def _run(self, source: str, tasks: Sequence[ArchiveTask], step: str) -> list[TaskFacts]:
        if not tasks:
            return []
        if self._spark is None:
            if self._progress is not None:
                self._progress.step("starting Spark", unit="tasks")
            from plait.spark.runtime.session import session

            self._spark = session("plait-archive", master=self._master)
        job = Job(self._archive.address, self._manifest.number + 1, source, tuple(tasks))
        return run_job(self._spark, job, step, self._progress)

    def _commit(
        self, sources: dict[str, ArchivedSource], new: Iterable[ArchivedFile], old: Iterable[ArchivedFile]
    ) -> None:
        gone = {file.path for file in old}
        files = [file for file in self._manifest.files if file.path not in gone]
        added = list(new)
        manifest = ArchiveManifest(
            number=self._manifest.number + 1,
            time=self._clock.now(),
            writer=chance.token(8),
            previous=self._manifest.writer,
            sources={**self._manifest.sources, **sources},
            files=[*files, *added],
        )
        known = {segment.path for source in self._manifest.sources.values() for segment in source.raw}
        raw = {segment.path for source in sources.values() for segment in source.raw}
        self._archive.sync_names([*(file.path for file in added), *sorted(raw - known)])
        self._archive.commit(manifest)
        self._manifest = manifest

    def _count(self, facts: list[TaskFacts], before: ArchivedSource, after: ArchivedSource) -> None:
        report = self.report
        files = [file for fact in facts for file in fact.files]
        copies = [segment for fact in facts for segment in fact.raw]
        counts = {kind: sum(file.count for file in files if file.kind == kind) for kind in (MESSAGES, ACTIONS, DEATHS)}
        report.messages += counts[MESSAGES]
        report.events += counts[ACTIONS]
        report.deaths += counts[DEATHS]
        report.files += len(files)
        report.segments += len(copies)
        report.size += sum(file.size for file in files) + sum(segment.size for segment in copies)
        report.log_size += after.log_size - before.log_size
        report.gaps += len(after.gaps) - len(before.gaps)
        report.left_out += len(after.left_out) - len(before.left_out)

    def _clean(self) -> None:
        """Remove files of runs that can no longer commit, unless one of the last two manifests names them.

        A reader may still use the manifest before this one. No later manifest adds a file with a number up to the
        number of this manifest. So a file that is removed here is in no manifest, now or later.
        """
        number = self._manifest.number
        if not self._is_newest():
            return
        named = {file.path for file in self._manifest.files}
        if number - 1 in self._archive.numbers():
            named |= {file.path for file in self._archive.read(number - 1).files}
        for directory in (MESSAGES, ACTIONS, DEATHS, RAW):
            for info in self._archive.list(directory, recursive=True):
                match = _OURS.fullmatch(info.base_name)
                path = self._archive.relative(info)
                if info.type == fs.FileType.File and match and int(match[1]) <= number and path not in named:
                    self._archive.remove(path)
                    self.report.removed += 1

    def _is_newest(self) -> bool:
        """Whether no other archiver has committed since this run read the manifest or committed its own."""
        return self._archive.newest() == (self._manifest.number, self._manifest.writer)


def _identity(data: str, disk: RealDisk) -> str:
    try:
        return identity(disk)
    except OSError as error:
        raise DataDirError(
            f"{data} has no directory id yet, and it cannot be written there ({error.strerror}): run the archiver once "
            "as a user with write permission, or start the server of the directory"
        ) from error
