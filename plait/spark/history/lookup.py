"""Finds messages of a subject in an archive and in the live log together.

The archive's manifest records up to which offset each data directory's log is archived; the log is read from there on.
So no message is returned twice and none is missing, whatever the archiver and retention do meanwhile: a lookup that
finds a file or a segment gone reads the newest manifest and starts again. Nothing here needs Spark or Java;
``spark_lookup`` runs the same reads on Spark.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Final, Self

import pyarrow as pa

from plait.client.arguments import limit_of
from plait.clock import Clock, SystemClock
from plait.errors import DataDirError, DataLost, Expired, InvalidArgument, SubjectNotFound
from plait.model import names
from plait.spark.archiving.manifest import (
    MESSAGES,
    RAW,
    Archive,
    ArchivedSource,
    ArchiveManifest,
    PartitionLife,
    source_id,
)
from plait.spark.history.pieces import (
    SCHEMA,
    ArchivedPiece,
    Piece,
    is_readable,
    lost_ranges,
    message_segments,
    plan_archived,
    plan_brokers,
    plan_live,
    plan_raw,
)
from plait.spark.history.selection import HistorySelection, When
from plait.spark.history.storage_order import Ordering
from plait.spark.inputs.parquet_files import FileGone, OpenFiles
from plait.storage.checkpoint import DIRECTORY as CHECKPOINT_DIRECTORY
from plait.storage.disk import RealDisk
from plait.storage.marks import known_identity
from plait.storage.reading.log_reader import MESSAGE_DIRECTORY

log = logging.getLogger("plait.spark")

#: The maximum number of attempts of a lookup whose files the archiver or retention removes.
LOOKS_MAX: Final = 5
#: The maximum of archived files that a lookup reads at the same time.
THREADS_MAX: Final = 8
#: Files per thread that are read before the caller needs them.
READ_AHEAD: Final = 2
#: The maximum of subjects that an error message lists.
SHOWN_MAX: Final = 20

#: The errors that can mean that the archiver, retention or a broker removed what a lookup was about to read.
REMOVED: Final = (Expired, FileGone, DataLost)
#: Called with the number of bytes read, and the approximate total.
Progress = Callable[[int, int], None]


class History:
    """Finds messages in an archive and in the data directories or the server that it was made from; a context manager.

    ``data`` is one data directory or several, ``server`` the address of a node; without either, only archived messages
    are found. ``group`` is the broker group of a directory that is not in the archive yet.
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
            raise InvalidArgument("both data and server are given, and they have the same messages; give one of them")
        self._archive = Archive.at(archive)
        directories = [data] if isinstance(data, str | os.PathLike) else list(data or [])
        # Absolute, for tasks in other processes.
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
    def location(self) -> str:
        """The path or URI of the archive as the user wrote it."""
        return self._archive.location

    @property
    def sources(self) -> dict[str, Any]:
        """What it reads from, independent of the working directory. The address of a server is left out: any other node
        of its cluster has the same messages.
        """
        return {
            "archive": self._archive.address,
            "data": sorted(self._directories),
            "group": self._group,
            "live": self._server is not None,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close files and threads."""
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
        """The first ``limit`` messages that match all conditions, in the order in which they were stored.

        The columns are those of the Spark source. ``since`` and ``until`` are store times: a datetime, ISO 8601 text,
        or "-5m" for five minutes before now. ``since`` is included, ``until`` is not.
        """
        selection = self.selection(subject, key=key, message_id=message_id, headers=headers, since=since, until=until)
        return self.table(selection, limit=limit)

    def selection(self, subject: str, **conditions: Any) -> HistorySelection:
        """The checked conditions of ``find``."""
        return HistorySelection.of(subject, now=self._clock.now(), **conditions)

    def table(self, selection: HistorySelection, *, limit: int | None = None) -> pa.Table:
        """All rows of a selection, in order."""
        tables = list(self.scan(selection, limit=limit))
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
        """All rows of a selection, in order, as a series of tables. ``encoded`` adds the column ``headers_encoded``.

        Before the first table is returned, ``found`` is called with each table that is read, in any order, and then
        ``counted`` with the number of rows that will be returned. If the read starts again because a piece was removed,
        ``found`` gets rows a second time.
        """

        def fill(ordering: Ordering) -> None:
            pieces = sorted(self.plan(selection), key=_read_order)
            done, total = 0, sum(piece.size for piece in pieces)
            for piece, tables in self._read(pieces, selection, ordering, encoded):
                for rows in tables:
                    ordering.add(rows)
                    if found is not None:
                        found(rows)
                done += piece.size
                if progress is not None:
                    progress(done, total)

        return self.ordered(fill, limit, counted)

    def ordered(
        self, fill: Callable[[Ordering], None], limit: int | None, counted: Callable[[int], None] | None = None
    ) -> Iterator[pa.Table]:
        """The first ``limit`` rows that ``fill`` adds, in order. Calls it again if a piece was removed meanwhile."""
        first = None if limit is None else limit_of(limit)
        for attempt in range(1, LOOKS_MAX + 1):
            with Ordering(limit=first) as ordering:
                try:
                    fill(ordering)
                except REMOVED:
                    if not self.may_look_again(attempt):
                        raise
                    continue
                if counted is not None:
                    counted(ordering.count if first is None else min(ordering.count, first))
                yield from ordering.tables()
            return

    def may_look_again(self, attempt: int) -> bool:
        """Whether to start again after a file was gone, since retention or the archiver may have removed it. If there
        is no newer manifest, only the first failure leads to a new start.
        """
        before = self._manifest.number
        return attempt < LOOKS_MAX and (self._latest().number != before or attempt == 1)

    def _read(
        self, pieces: list[Piece], selection: HistorySelection, ordering: Ordering, encoded: bool
    ) -> Iterator[tuple[Piece, Iterable[pa.Table]]]:
        if selection.few:
            # Each piece has few rows, usually: read pieces ahead in threads.
            yield from self._read_ahead(pieces, selection, encoded)
            return
        for piece in pieces:
            if ordering.bound is None or piece.time_min <= ordering.bound:
                yield piece, piece.read(selection, encoded=encoded, files=self._files)
            else:
                yield piece, ()

    def _read_ahead(
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
                # Only one more: if all pieces were read ahead, all rows of a key that is in every file would be in
                # memory.
                ahead.extend(self._threads.submit(read, piece) for piece in islice(waiting, 1))
        finally:
            for each in ahead:
                each.cancel()

    # --- planning -------------------------------------------------------------------------------

    def plan(self, selection: HistorySelection) -> list[Piece]:
        """All pieces that may have matching rows; each message is in one. Raises ``SubjectNotFound`` if neither the
        archive nor the log has the subject."""
        for _ in range(LOOKS_MAX):
            manifest = self._latest()
            pieces, known, warnings = self._live(manifest, selection)
            if not warnings or self._latest().number == manifest.number:
                break
        for warning in warnings:
            log.warning("%s", warning)
        pieces = [*plan_archived(self._archive, manifest, selection), *pieces]
        subject = selection.subject
        if not known and not any(file.subject == subject and file.kind == MESSAGES for file in manifest.files):
            raise self._not_found(manifest, subject)
        return pieces

    def _latest(self) -> ArchiveManifest:
        """The newest manifest; read again only if there is a newer one."""
        numbers = self._archive.numbers()
        if not numbers or numbers[-1] != self._manifest.number:
            self._manifest = self._archive.open()
        return self._manifest

    def _live(self, manifest: ArchiveManifest, selection: HistorySelection) -> tuple[list[Piece], bool, list[str]]:
        """The pieces outside Parquet files, whether they have the subject, and warnings about rows that are lost, or
        that this lookup does not read."""
        pieces: list[Piece] = []
        known = False
        warnings: list[str] = []
        readable = self._server is None and is_readable(self._archive)
        for name, source in manifest.sources.items():
            if not readable and message_segments(source):
                warnings.append(
                    f"{RAW}/{name} has segments that are in no Parquet file, and they are not read "
                    f"{'because the archive is not local' if self._server is None else 'together with a server'}; "
                    "run the archiver for the data directory that they were copied from without --raw too, so that "
                    "its messages are in Parquet files"
                )
            found = plan_raw(self._archive, name, source, selection) if readable else None
            if found is not None:
                pieces += found.pieces
                known = known or found.known
        if self._server is not None:
            asked = plan_brokers(self._server, selection, _archived(manifest, selection.subject))
            return [*pieces, *(asked or [])], asked is not None, warnings
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
                warnings += lost_ranges(name, covered, live.start)
        return pieces, known, warnings

    def _not_found(self, manifest: ArchiveManifest, subject: str) -> SubjectNotFound:
        subjects = sorted({file.subject for file in manifest.files if file.kind == MESSAGES})
        more = "" if len(subjects) <= SHOWN_MAX else f" and {len(subjects) - SHOWN_MAX} more"
        archived = f"has {', '.join(subjects[:SHOWN_MAX])}{more}" if subjects else "has no messages"
        where = ", ".join([f"the archive {self._archive.location!r}", *map(repr, self._directories)])
        if self._server is not None:
            where += f" or {self._server}"
        return SubjectNotFound(f"subject {subject!r} is not in {where}; the archive {archived}", subject=subject)


def _read_order(piece: Piece) -> tuple[bool, int]:
    """Sorts pieces: the oldest first, so that later files need not be read if only the first few rows are wanted.
    Pieces that are not archived come last. So if a subject was deleted and created again, rows with the same sequence
    come in the order of its lives. A resumed replay relies on that.
    """
    return not isinstance(piece, ArchivedPiece), piece.time_min


def _check_directory(path: str) -> None:
    """Check that a path is a data directory, and not copied segments, which may or may not be archived."""
    disk = RealDisk(path, read_only=True)
    if not disk.exists("") or not disk.exists(MESSAGE_DIRECTORY):
        raise DataDirError(f"{path!r} is not a Plait data directory: it has no {MESSAGE_DIRECTORY!r} directory")
    # A server creates the checkpoint directory. An archiver, or a broker of a cluster, creates the identity file.
    if not disk.exists(CHECKPOINT_DIRECTORY) and known_identity(disk) is None:
        raise DataDirError(
            f"{path!r} has segment files but is not a Plait data directory, so it is not known which of them are "
            "archived, and messages could be found twice. Give the directory that they were copied from. Segments that "
            "`--raw` copied into a local archive need no directory: they are found with the archive"
        )


def _source(manifest: ArchiveManifest, directory: str) -> tuple[str, ArchivedSource | None]:
    """The manifest's name and entry of a data directory, by its directory id."""
    identity = known_identity(RealDisk(directory, read_only=True))
    for name, source in manifest.sources.items():
        if identity is not None and name == source_id(source.group, identity):
            return name, source
    return directory, None


def _covers(source: ArchivedSource, subject: str) -> bool:
    """Whether the source's subjects include this one."""
    return source.whole or any(
        subject.startswith(name[:-1]) if name.endswith("*") else subject == name for name in source.subjects
    )


def _archived(manifest: ArchiveManifest, subject: str) -> dict[str, PartitionLife]:
    """``name@group`` → its newest archived life, in the sources that archive the subject."""
    sources = [source for source in manifest.sources.values() if _covers(source, subject)]
    return {name: lives[-1] for source in sources for name, lives in source.lives.items()}
