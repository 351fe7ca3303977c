"""A subject's whole history: what an archive has and what a log still has, as one.

The archive's manifest says up to which offset each data directory's log is archived; the log is read from there on.
So no message comes twice and none is missing, whatever archiver and retention do meanwhile: who finds a file or a
segment gone looks at the newest manifest and begins again. Nothing here needs Spark or Java; ``spark_lookup``
runs the same reading on Spark.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any, Final, Self

import pyarrow as pa

from plait.client.arguments import limit_of
from plait.clock import Clock, SystemClock
from plait.errors import DataDirError, Expired, InvalidArgument, SubjectNotFound
from plait.model import names
from plait.spark.archiving.manifest import MESSAGES, RAW, Archive, ArchivedSource, ArchiveManifest, source_id
from plait.spark.history.archived_part import ArchivedPiece, FileGone, OpenFiles, plan_archived
from plait.spark.history.broker_part import ArchivedUpTo, BrokerPart, plan_server
from plait.spark.history.live_part import SCHEMA, LivePiece, plan_live
from plait.spark.history.raw_segments import is_readable, message_segments, plan_raw, uncovered
from plait.spark.history.selection import HistorySelection, When
from plait.spark.history.storage_order import Ordering
from plait.storage.checkpoint import DIRECTORY as CHECKPOINT_DIRECTORY
from plait.storage.directory_id import known_identity
from plait.storage.disk import RealDisk
from plait.storage.reading.log_reader import MESSAGE_DIRECTORY

log = logging.getLogger("plait.spark")

#: Where archiver or retention replace what is read, looking again this often finds a moment of rest.
LOOKS_MAX: Final = 5
#: Files of an archive that are read at once for a lookup.
THREADS_MAX: Final = 8
#: Each thread has so many of them in hand or done, before they are asked for.
READ_AHEAD: Final = 2
#: Names of subjects that an error message lists.
SHOWN_MAX: Final = 20

Piece = ArchivedPiece | LivePiece | BrokerPart
#: Told how many bytes are read, and how many there are to read, about.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class HistoryPlan:
    """Everything that may hold what is meant; each message is in one piece."""

    selection: HistorySelection
    pieces: list[Piece]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


class History:
    """An archive, and the data directories or the server that it was made from; for ``with``, or to keep.

    ``data`` names one data directory or several, ``server`` a node; without either, only what is archived is found.
    ``group`` is the broker group of a directory that the archive does not know yet.
    """

    def __init__(
        self,
        archive: str | os.PathLike[str],
        *,
        data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        server: str | None = None,
        group: str = "g1",
        clock: Clock | None = None,
    ) -> None:
        if data is not None and server is not None:
            raise InvalidArgument("give a data directory or a server, not both: they have the same messages")
        self._archive = Archive.at(archive)
        directories = [data] if isinstance(data, str | os.PathLike) else list(data or [])
        # As tasks elsewhere know them.
        self._directories = [os.path.abspath(directory) for directory in directories]
        self._server = server
        self._group = names.check("group", group)
        self._clock = clock or SystemClock()
        self._files = OpenFiles()
        self._manifest = self._archive.open()
        self._threads: ThreadPoolExecutor | None = None
        for directory in self._directories:
            _check_directory(directory)

    @property
    def place(self) -> str:
        """The archive, as its user named it."""
        return self._archive.place

    @property
    def sources(self) -> dict[str, Any]:
        """Where it looks, as other processes would say it. A server is not named: another one of its cluster has the
        same messages.
        """
        return {
            "archive": self._archive.address,
            "data": sorted(self._directories),
            "group": self._group,
            "live": self._server is not None,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of files and threads."""
        self._files = OpenFiles()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    # --- finding --------------------------------------------------------------------------------

    def find(
        self,
        subject: str,
        *,
        key: str | int | None = None,
        message_id: object = None,
        headers: Mapping[str, Any] | None = None,
        since: When | None = None,
        until: When | None = None,
        limit: int | None = None,
    ) -> pa.Table:
        """The messages that meet all conditions, in the order they were stored; the first ``limit`` of them.

        The columns are those of the Spark source. ``since`` and ``until`` are store times: a datetime, ISO 8601, or
        "-5m" before now; the first is included, the second is not.
        """
        selection = self.selection(subject, key=key, message_id=message_id, headers=headers, since=since, until=until)
        return self.table(selection, limit=limit)

    def selection(self, subject: str, **conditions: Any) -> HistorySelection:
        """The conditions of ``find``, checked."""
        return HistorySelection.of(subject, now=self._clock.now(), **conditions)

    def table(
        self, selection: HistorySelection, *, limit: int | None = None, progress: Progress | None = None
    ) -> pa.Table:
        """All rows of a selection, in order."""
        tables = list(self.scan(selection, limit=limit, progress=progress))
        return pa.concat_tables(tables) if tables else pa.Table.from_batches([], SCHEMA)

    def scan(
        self,
        selection: HistorySelection,
        *,
        limit: int | None = None,
        progress: Progress | None = None,
        counted: Callable[[int], None] | None = None,
        found: Callable[[pa.Table], None] | None = None,
        encoded: bool = False,
    ) -> Iterator[pa.Table]:
        """The same, a table after another, however many there are; ``encoded``: with ``headers_encoded`` at the end.

        Before the first row comes, ``found`` has had all of them, in any order, and ``counted`` their number.
        """
        first = None if limit is None else limit_of(limit)
        for attempt in range(1, LOOKS_MAX + 1):
            with Ordering(limit=first) as ordering:
                try:
                    self._collect(self.plan(selection), ordering, progress, found, encoded)
                except (Expired, FileGone):
                    if not self.may_look_again(attempt):
                        raise
                    continue
                if counted is not None:
                    counted(ordering.count if first is None else min(ordering.count, first))
                yield from ordering.tables()
            return

    def may_look_again(self, attempt: int) -> bool:
        """After a file was gone: retention or the archiver was faster. What a newer manifest does not explain is an
        error.
        """
        before = self._manifest.number
        return attempt < LOOKS_MAX and (self._latest().number != before or attempt == 1)

    def _collect(
        self,
        plan: HistoryPlan,
        ordering: Ordering,
        progress: Progress | None,
        found: Callable[[pa.Table], None] | None,
        encoded: bool,
    ) -> None:
        """Read everything that may hold what is meant."""
        selection = plan.selection
        done, total = 0, plan.size
        pieces = sorted(plan.pieces, key=_place_of)
        read: Iterable[tuple[Piece, Iterable[pa.Table]]]
        if selection.few:
            # Few rows of each, mostly: they are read before they are needed.
            read = self._read_at_once(pieces, selection, encoded)
        else:
            read = ((piece, self._read(piece, selection, ordering, encoded)) for piece in pieces)
        for piece, tables in read:
            for rows in tables:
                ordering.add(rows)
                if found is not None:
                    found(rows)
            done += piece.size
            if progress is not None:
                progress(done, total)

    def _read(self, piece: Piece, selection: HistorySelection, ordering: Ordering, encoded: bool) -> Iterable[pa.Table]:
        if ordering.bound is not None and _time_of(piece) > ordering.bound:
            return ()
        return piece.read(selection, encoded=encoded, files=self._files)

    def _read_at_once(
        self, pieces: list[Piece], selection: HistorySelection, encoded: bool
    ) -> Iterator[tuple[Piece, Iterable[pa.Table]]]:
        def read(piece: Piece) -> tuple[Piece, list[pa.Table]]:
            return piece, list(piece.read(selection, encoded=encoded, files=self._files))

        if len(pieces) < 2:
            yield from map(read, pieces)
            return
        count = min(THREADS_MAX, os.cpu_count() or 1)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(count, thread_name_prefix="plait-history")
        waiting = iter(pieces)
        ahead = deque(self._threads.submit(read, piece) for piece in islice(waiting, READ_AHEAD * count))
        try:
            while ahead:
                yield ahead.popleft().result()
                # No further: of a key that is in every file, all of them would be in memory.
                ahead.extend(self._threads.submit(read, piece) for piece in islice(waiting, 1))
        finally:
            for each in ahead:
                each.cancel()

    # --- planning -------------------------------------------------------------------------------

    def plan(self, selection: HistorySelection) -> HistoryPlan:
        """Where it has to be looked for. ``SubjectNotFound`` where nobody knows the subject."""
        for _ in range(LOOKS_MAX):
            manifest = self._latest()
            pieces, known, told = self._live(manifest, selection)
            if not told or self._latest().number == manifest.number:
                break
        for each in told:
            log.warning("%s", each)
        pieces = [*plan_archived(self._archive, manifest, selection), *pieces]
        subject = selection.subject
        if not known and not any(file.subject == subject and file.kind == MESSAGES for file in manifest.files):
            raise self._not_found(manifest, subject)
        return HistoryPlan(selection, pieces)

    def _latest(self) -> ArchiveManifest:
        """The newest manifest; read again only where there is a newer one."""
        numbers = self._archive.numbers()
        if not numbers or numbers[-1] != self._manifest.number:
            self._manifest = self._archive.open()
        return self._manifest

    def _live(self, manifest: ArchiveManifest, selection: HistorySelection) -> tuple[list[Piece], bool, list[str]]:
        """What is in no Parquet file, whether the subject is known there, and what is not looked into or nowhere."""
        pieces: list[Piece] = []
        known = False
        told: list[str] = []
        readable = self._server is None and is_readable(self._archive)
        for name, source in manifest.sources.items():
            if not readable and message_segments(source):
                told.append(
                    f"{RAW}/{name} has segments that are in no Parquet file, and they are not looked into "
                    f"{'where the archive is not on this machine' if self._server is None else 'beside a server'}: "
                    "archive without --raw, too"
                )
            found = plan_raw(self._archive, name, source, selection) if readable else None
            if found is not None:
                pieces += found.pieces
                known = known or found.known
        if self._server is not None:
            asked = plan_server(self._server, selection, _archived(manifest, selection.subject))
            return [*pieces, *(asked or [])], asked is not None, told
        for directory in self._directories:
            name, origin = _source(manifest, directory)
            group = self._group if origin is None else origin.group
            covered = origin if origin is not None and _covers(origin, selection.subject) else None
            offset = 0
            if covered is not None:
                offset = max(covered.message_offset, covered.raw_message_offset if readable else 0)
            live = plan_live(directory, group, selection, offset)
            pieces += live.pieces
            known = known or live.known
            if covered is not None:
                told += _lost(name, covered, live.start)
        return pieces, known, told

    def _not_found(self, manifest: ArchiveManifest, subject: str) -> SubjectNotFound:
        there = sorted({file.subject for file in manifest.files if file.kind == MESSAGES})
        more = "" if len(there) <= SHOWN_MAX else f" and {len(there) - SHOWN_MAX} more"
        archived = f"it has {', '.join(there[:SHOWN_MAX])}{more}" if there else "it has no messages"
        where = ", ".join([f"the archive {self._archive.place!r}", *map(repr, self._directories)])
        if self._server is not None:
            where += f" or {self._server}"
        return SubjectNotFound(f"subject {subject!r} is not in {where}; of the archive: {archived}", subject=subject)


def _place_of(piece: Piece) -> tuple[bool, int]:
    """The oldest first: where only the first few are wanted, later files need not be looked at. What is not archived
    comes last: of a subject that was made anew, rows of one sequence come in the order of its lives, which whoever
    goes on with a replay relies on.
    """
    return not isinstance(piece, ArchivedPiece), _time_of(piece)


def _time_of(piece: Piece) -> int:
    """The least store time of its rows, as far as that is known."""
    return piece.file.time_min if isinstance(piece, ArchivedPiece) else 0


def _check_directory(path: str) -> None:
    """A data directory and not copied segments, of which nobody could tell whether they are archived."""
    disk = RealDisk(path, read_only=True)
    if not disk.exists("") or not disk.exists(MESSAGE_DIRECTORY):
        raise DataDirError(f"{path!r} is not a Plait data directory: it has no {MESSAGE_DIRECTORY!r} directory")
    # A server makes the one, an archiver the other.
    if not disk.exists(CHECKPOINT_DIRECTORY) and known_identity(disk) is None:
        raise DataDirError(
            f"{path!r} has copied segment files and is not a Plait data directory: nobody could tell what of them is "
            "archived, and messages would come twice. Name the directory that they were copied from; an archive's "
            "own are found with it"
        )


def _source(manifest: ArchiveManifest, directory: str) -> tuple[str, ArchivedSource | None]:
    """A data directory as the manifest knows it, by the name that its files carry."""
    identity = known_identity(RealDisk(directory, read_only=True))
    for name, source in manifest.sources.items():
        if identity is not None and name == source_id(source.group, identity):
            return name, source
    return directory, None


def _lost(name: str, source: ArchivedSource, log_start: int) -> list[str]:
    """What is nowhere any more, now that the log begins at an offset."""
    segments = message_segments(source)
    # What was gone before anything was archived is nobody's loss.
    begun = source.message_offset or (segments[0].start if segments else 0)
    return [
        f"{end - start} bytes of the log of {name} are nowhere any more: retention removed them before they were "
        f"archived (offsets {start} to {end}); archive more often, or keep longer"
        for start, end in uncovered(segments, begun, log_start)
    ]


def _covers(source: ArchivedSource, subject: str) -> bool:
    """The subject is one that is archived."""
    return source.whole or any(
        subject.startswith(name[:-1]) if name.endswith("*") else subject == name for name in source.subjects
    )


def _archived(manifest: ArchiveManifest, subject: str) -> dict[str, ArchivedUpTo]:
    """What the archive has of each partition of a subject."""
    times: dict[str, int] = {}
    for file in manifest.files:
        if file.kind == MESSAGES and file.subject == subject:
            for partition in file.partitions:
                times[partition] = max(times.get(partition, 0), file.time_max)
    nexts: dict[str, int] = {}
    for source in manifest.sources.values():
        if _covers(source, subject):
            nexts.update(source.sequences)
    return {partition: ArchivedUpTo(nexts[partition], time) for partition, time in times.items() if partition in nexts}
