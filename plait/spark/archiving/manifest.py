"""The manifest of an archive: which files it consists of, and how far each data directory is in it.

A directory of Parquet files is an archive by what ``_plait/manifest-<number>-<writer>.json`` says, once there is a file
``_plait/commit-<number>-<writer>`` beside it. The highest number is the truth; a manifest is written once, whole, and
never changed. A file that it does not name does not exist: a run that ended early left it. Nothing here needs Spark:
lookups read the manifest in a process without Java.

Promise: manifests are a chain. Of several archivers that commit one number one succeeds, however slow each of them is;
the others get ``ArchiveConflict`` and have changed nothing (``plait.spark.archiving.manifest_votes``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Final, Literal
from urllib.parse import quote, unquote

import msgspec
import pyarrow as pa
from crc32c import crc32c
from pyarrow import fs

from plait.errors import ArchiveError
from plait.spark.archiving import manifest_votes as commits

#: 2: reasons of deaths, and what subjects' settings say; an archive of version 1 is read, and gone on with.
FORMAT_VERSION: Final = 2
DIRECTORY: Final = "_plait"
MESSAGES: Final = "messages"
ACTIONS: Final = "actions"
DEATHS: Final = "deaths"
RAW: Final = "raw"
#: What has files by day alone.
DayKind = Literal["actions", "deaths"]
#: Listings of an archive in a row, each of whose newest manifest others removed before it was read.
LOOKS_MAX: Final = 10
#: What a partition value of a path may not hold as it is (as Hive and Spark have it), and what would end a path's part.
_PLAIN: Final = " !\"$&'()+,-.;<>@_`|~"


class ArchivedFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One Parquet file. Its rows come from [start, end) of the source's message log, action log or kept log."""

    #: Below the archive.
    path: str
    kind: Literal["messages"] | DayKind
    #: Of actions and deaths: empty.
    subject: str = ""
    #: YYYY-MM-DD, in UTC.
    date: str
    count: int
    #: Of the file, and of what is in it before compression.
    size: int
    raw_size: int = 0
    #: Of the rows, in the order of the file (``plait.spark.archiving.digest``).
    checksum: int
    source: str
    start: int
    end: int
    #: ``name@group`` → the first sequence and the last one.
    partitions: dict[str, tuple[int, int]] = {}
    #: The first and the last key; None: no row has one.
    key_min: str | None = None
    key_max: str | None = None
    #: Store times of messages, times of events and deaths: microseconds since 1970.
    time_min: int
    time_max: int


class RawSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A segment file, copied whole."""

    path: str
    #: Log offsets.
    start: int
    end: int
    size: int
    crc: int


class ArchivedGap(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sequences [start, end) of a partition that the log does not have."""

    partition: str
    start: int
    end: int
    #: Retention removed log before it was archived, these among it: nothing was lost that was to be kept.
    expired: bool = False
    #: The partition's number in its data directory; 0: an earlier Plait did not say.
    number: int = 0


class PartitionLife(msgspec.Struct, frozen=True, kw_only=True):
    """What is archived of a partition from when it was made until its subject was deleted.

    A subject that is made anew has partitions of the same names, which count from 0 again.
    """

    #: The partition's number in its data directory: another one each time.
    number: int
    #: Log offset: files with its rows start here or later, and before the next life.
    offset: int
    #: The sequences [start, end) that were archived, ascending; what lies between is in no file. The first starts, and
    #: the last ends, where those of the log did: it is empty if what was there did not verify.
    ranges: list[tuple[int, int]]
    #: (first sequence, epoch), ascending.
    epochs: list[tuple[int, int]]

    @property
    def start(self) -> int:
        return self.ranges[0][0]

    @property
    def end(self) -> int:
        """The sequence that comes next."""
        return self.ranges[-1][1]


class LeftOut(msgspec.Struct, frozen=True):
    """Damaged bytes of a log that somebody chose to go on without."""

    log: str
    offset: int
    size: int
    reason: str


class ArchivedSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an audit has to know of a partition beside its rows, as of the last commit."""

    #: "best_tried" or "strict".
    order: str = "best_tried"
    #: When it was made, in microseconds since 1970: older rows are of one that was deleted.
    created: int = 0
    #: It was deleted, and the last of its messages may not have been archived. Without a number: one of its name was.
    deleted: bool = False
    #: The logical partitions [first, end) that it took from each of these sequences on; none: all.
    taken: list[tuple[int, list[tuple[int, int]]]] = []
    #: The logical partitions [first, end) that it takes no more, and the sequence behind the last row that it took.
    fences: list[tuple[int, int, int]] = []
    #: Its number in its data directory (``PartitionLife.number``), and its subject; 0: an earlier Plait did not say.
    number: int = 0
    subject: str = ""
    #: Nothing of it was removed from the log before it was archived: it begins with sequence 0.
    whole: bool = False
    #: The log that is archived had come to this sequence at least, whether it can be read or not.
    next: int = 0


class FrameMark(msgspec.Struct, frozen=True, kw_only=True):
    """A frame of a log: where it is, and the checksums of its stamp and of the rest of it."""

    offset: int
    stamp_crc: int
    crc: int


class ArchivedSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A data directory, and how far its first-hand logs are in the archive."""

    #: The broker group, as partitions are named by it.
    group: str
    #: Everything before these log offsets is in the archive, as far as ``subjects`` asks for it.
    message_offset: int = 0
    action_offset: int = 0
    #: Of the kept log: why messages died, as far as archived events tell of their deaths.
    kept_offset: int = 0
    #: The subjects that are archived: names, or beginnings and "*"; none: all of them.
    subjects: list[str] = []
    #: ``name@group`` → its lives, the oldest first.
    lives: dict[str, list[PartitionLife]] = {}
    gaps: list[ArchivedGap] = []
    left_out: list[LeftOut] = []
    #: Partitions of which nothing was archived since retention removed log that was not: their next gap is expired.
    overtaken: list[str] = []
    #: The end of the message log that archived events rest on; None: it is not known.
    rests_on: int | None = None
    #: ``name@group`` → what it is like; none: it is not known.
    settings: dict[str, ArchivedSettings] = {}
    #: The same, of partitions that were deleted, have another one of their name now, and have archived messages.
    former: list[ArchivedSettings] = []
    #: The same, of segments that are kept as they are.
    raw_message_offset: int = 0
    raw_action_offset: int = 0
    raw_kept_offset: int = 0
    raw: list[RawSegment] = []
    #: A frame of the message log, by which the log is known again; none: there was none.
    mark: FrameMark | None = None

    def has_all_of(self, partition: str) -> bool:
        """Each message of the partition that has this name now, and that an archived event can be about, was archived,
        or is told to be missing."""
        settings = self.settings.get(partition)
        return (
            settings is not None
            and not settings.deleted
            and self.rests_on is not None
            and self.rests_on <= self.message_offset
            and partition not in self.overtaken
            and not any(stretch.log == "message" for stretch in self.left_out)
        )

    @property
    def whole(self) -> bool:
        """Every subject is archived, not only some."""
        return not self.subjects

    @property
    def sequences(self) -> dict[str, int]:
        """``name@group`` → the sequence that comes next."""
        return {name: lives[-1].end for name, lives in self.lives.items()}


class ArchiveManifest(msgspec.Struct, frozen=True, kw_only=True):
    """An archive as of one commit."""

    version: int = FORMAT_VERSION
    number: int = 0
    #: When it was committed, in microseconds since 1970, by its archiver's clock: for people, it decides nothing.
    time: int = 0
    #: Drawn for this manifest, in lower-case letters and digits; and that of the manifest before it.
    writer: str = ""
    previous: str = ""
    #: Source id (``<group>-<identity of the data directory>``) → how far it is.
    sources: dict[str, ArchivedSource] = {}
    files: list[ArchivedFile] = []

    def find(
        self, kind: str, *, subjects: Iterable[str] | None = None, time_min: int = 0, time_max: int | None = None
    ) -> list[ArchivedFile]:
        """Files of a kind that may hold rows of these subjects and times."""
        wanted = None if subjects is None else frozenset(subjects)
        return [
            file
            for file in self.files
            if file.kind == kind
            and (wanted is None or file.subject in wanted)
            and file.time_max >= time_min
            and (time_max is None or file.time_min <= time_max)
        ]


class _ManifestFile(msgspec.Struct, frozen=True):
    """The manifest as it lies in its file; ``crc`` is of its bytes."""

    crc: int
    manifest: msgspec.Raw


class Archive:
    """A place for archived files: any file system that Arrow reaches (local, s3://, hdfs://, gs://)."""

    def __init__(self, files: fs.FileSystem, root: str, place: str) -> None:
        self.files = files
        self.root = root.rstrip("/")
        #: For messages: the path as its user wrote it.
        self.place = place

    @classmethod
    def at(cls, place: str | os.PathLike[str]) -> Archive:
        """The archive at a path or a URI; there need not be one yet."""
        text = os.fspath(place)
        try:
            if "://" in text:
                files, root = fs.FileSystem.from_uri(text)
            else:
                files, root = fs.LocalFileSystem(), os.path.abspath(text)
        except (pa.ArrowException, ValueError, OSError) as error:
            raise ArchiveError(f"archive {text!r} cannot be reached: {_first_line(error)}") from error
        return cls(files, root, text)

    @property
    def address(self) -> str:
        """As other processes find it, wherever they were started."""
        return self.place if "://" in self.place else self.root

    def path(self, relative: str) -> str:
        """A path below the archive, as its file system knows it."""
        return f"{self.root}/{relative}" if relative else self.root

    # --- reading --------------------------------------------------------------------------------

    def numbers(self) -> list[int]:
        """The numbers of the manifests there are, ascending."""
        votes = commits.look(self)
        return sorted(number for number, writer in votes.committed.items() if (number, writer) in votes.manifests)

    def newest(self) -> tuple[int, str]:
        """Number and writer of the newest manifest; number 0: there is none."""
        votes = commits.look(self)
        return votes.newest, votes.committed.get(votes.newest, "")

    def load(self) -> ArchiveManifest:
        """The newest manifest; an empty one, of number 0, where nothing was archived yet."""
        number, writer = self.newest()
        for _ in range(LOOKS_MAX):
            try:
                return self._read(number, writer) if number else ArchiveManifest()
            except ArchiveError:
                # It may have become history since it was listed.
                before, (number, writer) = number, self.newest()
                if number == before:
                    raise
        raise ArchiveError(f"archivers change {self.place!r} faster than its manifest can be read")

    def open(self) -> ArchiveManifest:
        """The newest manifest; ``ArchiveError`` where there is no archive."""
        manifest = self.load()
        if not manifest.number:
            raise ArchiveError(f"{self.place!r} is not an archive: it has no {DIRECTORY}/commit-* file")
        return manifest

    def read(self, number: int) -> ArchiveManifest:
        """One manifest that was committed. One that does not read back whole is damage, and no older one takes its
        place."""
        writer = commits.look(self).committed.get(number)
        if writer is None:
            raise ArchiveError(f"{self.place!r} has no manifest {number}, or not any more")
        return self._read(number, writer)

    def _read(self, number: int, writer: str) -> ArchiveManifest:
        relative = f"{DIRECTORY}/{commits.manifest_name(number, writer)}"
        try:
            with self.files.open_input_stream(self.path(relative)) as stream:
                data = stream.read()
        except OSError as error:
            raise ArchiveError(f"{self.place}/{relative} cannot be read: {_first_line(error)}") from error
        try:
            stored = msgspec.json.decode(data, type=_ManifestFile)
            raw = bytes(stored.manifest)
            if crc32c(raw) != stored.crc:
                raise ValueError("its checksum does not match")
            version = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).get("version")
            if version is not None and int(bytes(version)) > FORMAT_VERSION:
                raise ArchiveError(
                    f"{self.place}/{relative} has format version {int(bytes(version))}, this Plait reads "
                    f"up to {FORMAT_VERSION}; use the newer Plait that wrote it (nothing was touched)"
                )
            return msgspec.json.decode(raw, type=ArchiveManifest)
        except ValueError as error:
            raise ArchiveError(
                f"{self.place}/{relative} is damaged: {error}. Restore the file from a copy; the archived files "
                "themselves are untouched"
            ) from error

    def names(self) -> list[str]:
        """Names of the files beside the manifest."""
        return [info.base_name for info in self.list(DIRECTORY)]

    def list(self, relative: str, *, recursive: bool = False) -> list[fs.FileInfo]:
        """What is in a directory; empty when there is none."""
        selector = fs.FileSelector(self.path(relative), recursive=recursive, allow_not_found=True)
        try:
            found: list[fs.FileInfo] = self.files.get_file_info(selector)
        except (pa.ArrowException, OSError) as error:
            raise ArchiveError(f"{self.place}/{relative} cannot be listed: {_first_line(error)}") from error
        return found

    def relative(self, info: fs.FileInfo) -> str:
        """A listed path, below the archive."""
        path: str = info.path
        return path[len(self.root) + 1 :]

    # --- writing --------------------------------------------------------------------------------

    def commit(self, manifest: ArchiveManifest) -> None:
        """Make it the archive's state; durable when this returns. Older manifests go, but for the last few.

        ``ArchiveConflict`` where another archiver has committed this number, or a higher one.
        """
        raw = msgspec.json.encode(manifest)
        data = msgspec.json.encode(_ManifestFile(crc32c(raw), msgspec.Raw(raw)))
        self.files.create_dir(self.path(DIRECTORY), recursive=True)
        commits.commit(self, manifest.number, manifest.writer, manifest.previous, data)

    def has(self, name: str) -> bool:
        """There is such a file beside the manifest."""
        found: bool = self.files.get_file_info(self.path(f"{DIRECTORY}/{name}")).type != fs.FileType.NotFound
        return found

    def put(self, name: str, data: bytes = b"") -> None:
        """A file beside the manifest, whole and durable when this returns."""
        relative = f"{DIRECTORY}/{name}"
        self.write(relative, data)
        if data:
            self.make_durable(relative)
        self.sync_names([relative])

    def discard(self, name: str) -> None:
        """Remove a file beside the manifest; nothing when there is none."""
        self.remove(f"{DIRECTORY}/{name}")

    def make_directory(self, relative: str) -> None:
        """With its parents, closed to other users. Object stores have none: a file's name is all there is."""
        path = self.path(relative)
        if isinstance(self.files, fs.LocalFileSystem):
            missing = []
            while not os.path.isdir(path):
                missing.append(path)
                path = os.path.dirname(path)
            for each in reversed(missing):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(each, 0o750)
        else:
            self.files.create_dir(path, recursive=True)

    def make_durable(self, relative: str) -> None:
        """A file that was written survives the machine when this returns, once its name does (``sync_names``).

        Other file systems than a local one promise it when a file is closed.
        """
        if isinstance(self.files, fs.LocalFileSystem):
            fd = os.open(self.path(relative), os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def sync_names(self, paths: Iterable[str]) -> None:
        """The names of these files, and of the directories that lead to them, are durable when this returns."""
        if not isinstance(self.files, fs.LocalFileSystem):
            return
        directories: set[str] = set()
        for path in paths:
            while path:
                path = os.path.dirname(path)
                directories.add(path)
        for directory in sorted(directories, reverse=True):
            sync_directory(self.path(directory))

    def remove(self, relative: str) -> None:
        """Remove a file; nothing when there is none."""
        with contextlib.suppress(FileNotFoundError):
            self.files.delete_file(self.path(relative))

    def write(self, relative: str, data: bytes) -> None:
        """A small file, whole."""
        with self.files.open_output_stream(self.path(relative)) as stream:
            stream.write(data)


def sync_directory(path: str) -> None:
    """Names in a local directory are durable when this returns."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def source_id(group: str, identity: str) -> str:
    """How the manifest names a data directory."""
    return f"{group}-{identity}"


def subject_directory(subject: str, date: str) -> str:
    """Where the messages of a subject and a day are, escaped as Hive and Spark do it."""
    return f"{MESSAGES}/subject={quote(subject, safe=_PLAIN)}/date={date}"


def day_directory(kind: str, date: str) -> str:
    """Where the events or deaths of a day are."""
    return f"{kind}/date={date}"


def subject_of(path: str) -> str:
    """The subject that ``subject_directory`` put into a path."""
    return unquote(path.split("subject=", 1)[1].split("/", 1)[0])


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
