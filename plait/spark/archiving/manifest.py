"""The manifest of an archive: its files, and up to which offsets each data directory is archived.

An archive consists of the Parquet files that ``_plait/manifest-<number>-<writer>.json`` names, once the file
``_plait/commit-<number>-<writer>`` exists. The manifest with the highest number is the valid one. A manifest is written
once and never changed. A file that it does not name is not part of the archive: a run has not committed it yet or ended
before it could, or compaction replaced it. Nothing here needs Spark, because lookups read the manifest in a process
without Java.

Promise: manifests are a chain. Of several archivers that commit the same number, at most one manifest is chosen,
however slow each archiver is. The others fail with ``ArchiveConflict``. An archiver may also get this error although
its manifest was chosen, or is chosen later by another archiver; the archive then has its changes
(``plait.spark.archiving.manifest_votes``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal
from urllib.parse import quote

import msgspec
from crc32c import crc32c

from plait.errors import ArchiveError
from plait.spark.archiving import manifest_votes as commits
from plait.spark.archiving.archive_files import DIRECTORY, ArchiveFiles, first_line

FORMAT_VERSION: Final = 1
MESSAGES: Final = "messages"
ACTIONS: Final = "actions"
DEATHS: Final = "deaths"
RAW: Final = "raw"
FileKind = Literal["messages", "actions", "deaths"]
#: Attempts to read the newest manifest: other archivers may remove it between the listing and the read.
LOOKS_MAX: Final = 10
#: Characters that a partition value in a path keeps unescaped, as in Hive and Spark.
_PLAIN: Final = " !\"$&'()+,-.;<>@_`|~"


class ArchivedFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One Parquet file. Its rows come from [start, end) of the source's message log, action log or retained log."""

    #: Relative to the archive.
    path: str
    kind: FileKind
    #: Empty for actions and deaths.
    subject: str = ""
    #: YYYY-MM-DD, in UTC.
    date: str
    count: int
    #: Size of the file, and of its rows before compression.
    size: int
    raw_size: int = 0
    #: CRC-32C of the file.
    crc: int
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
    """A copied segment file."""

    path: str
    #: Log offsets.
    start: int
    end: int
    size: int
    crc: int


class ArchivedGap(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sequences [start, end) of a partition that the log does not have."""

    partition: str
    #: The partition's number in its data directory.
    number: int
    start: int
    end: int
    #: True if retention removed these sequences before they were archived: they were past their retention time.
    expired: bool = False


class PartitionLife(msgspec.Struct, frozen=True, kw_only=True):
    """The archived rows of a partition from its creation until the deletion of its subject.

    A subject that is deleted and created again has partitions with the same names, and their sequences restart at 0.
    """

    #: The partition's number in its data directory: different for each life.
    number: int
    #: Log offset: files with its rows start here or later, and before the next life.
    offset: int
    #: The archived ranges of sequences [start, end), ascending; sequences between them are in no file. The first range
    #: starts at the first sequence that the log had for this life, and the last ends at its end. If the frames at
    #: either end do not verify, an empty range marks that end.
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
    """Bytes of a log that are not in the archive: damaged and skipped on request, or removed by retention."""

    log: str
    offset: int
    size: int
    reason: str


class ArchivedSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The facts about a partition that an audit needs besides its rows, as of the last commit."""

    #: Its number in its data directory (``PartitionLife.number``).
    number: int
    subject: str
    #: "best_tried" or "strict".
    order: str = "best_tried"
    #: When it was created, in microseconds since 1970: older rows belong to a deleted partition of the same name.
    created: int = 0
    #: True if the partition was deleted; its last messages may not have been archived.
    deleted: bool = False
    #: (sequence, the logical partitions [first, end) whose rows the partition accepted from that sequence on). An empty
    #: list: the rows of all logical partitions.
    taken: list[tuple[int, list[tuple[int, int]]]] = []
    #: The sealed logical partitions [first, end), and their fence: the partition accepted their rows before this
    #: sequence.
    fences: list[tuple[int, int, int]] = []
    #: True if nothing of the partition was removed from the log before it was archived: its archived rows begin with
    #: sequence 0.
    whole: bool = False
    #: The archived log had reached at least this sequence, whether its rows can be read or not.
    next: int = 0


class FrameMark(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies a frame of a log: its offset, and the checksums of its stamp and of the rest of the frame."""

    offset: int
    stamp_crc: int
    crc: int


class ArchivedSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A data directory, and up to which offsets its first-hand logs are archived."""

    #: The broker group in the names of its partitions.
    group: str
    #: The archive has everything before these log offsets, for the subjects in ``subjects``.
    message_offset: int = 0
    action_offset: int = 0
    #: An offset in the retained log. The archive has the deaths before it. The archived events depend on the retained
    #: log up to this offset, and not beyond.
    retained_offset: int = 0
    #: The archived subjects: names, or prefixes with "*"; none: all of them.
    subjects: list[str] = []
    #: ``name@group`` → its lives, the oldest first.
    lives: dict[str, list[PartitionLife]] = {}
    gaps: list[ArchivedGap] = []
    left_out: list[LeftOut] = []
    #: Partitions that got no archived rows since retention removed an unarchived part of the log. Their next gap is
    #: marked as expired.
    overtaken: list[str] = []
    #: The end of the part of the message log that archived events refer to.
    rests_on: int = 0
    #: ``name@group`` → settings of the partition.
    settings: dict[str, ArchivedSettings] = {}
    #: Settings of deleted partitions that have archived messages and whose name another partition has now.
    former: list[ArchivedSettings] = []
    #: The archive has copies of all segments before these log offsets.
    raw_message_offset: int = 0
    raw_action_offset: int = 0
    raw_retained_offset: int = 0
    raw: list[RawSegment] = []
    #: A frame of the message log, by which a later run recognizes the log; None: the log had no frame.
    mark: FrameMark | None = None

    def has_all_of(self, partition: str) -> bool:
        """Whether every message that an archived event can refer to is archived or recorded as missing, for the current
        partition of this name."""
        settings = self.settings.get(partition)
        return (
            settings is not None
            and not settings.deleted
            and self.rests_on <= self.message_offset
            and partition not in self.overtaken
            and not any(left_out.log == "message" for left_out in self.left_out)
        )

    @property
    def whole(self) -> bool:
        """Whether all subjects are archived, not only some."""
        return not self.subjects

    @property
    def log_size(self) -> int:
        """Bytes of the logs that are archived, as rows and as copied segments."""
        rows = self.message_offset + self.action_offset + self.retained_offset
        return rows + self.raw_message_offset + self.raw_action_offset + self.raw_retained_offset

    @property
    def sequences(self) -> dict[str, int]:
        """``name@group`` → the sequence that comes next."""
        return {name: lives[-1].end for name, lives in self.lives.items()}


class ArchiveManifest(msgspec.Struct, frozen=True, kw_only=True):
    """An archive as of one commit."""

    version: int = FORMAT_VERSION
    number: int = 0
    #: When it was committed, in microseconds since 1970, by the archiver's clock. For people; no code depends on it.
    time: int = 0
    #: A random token of this manifest, in lower-case letters and digits, and the token of the manifest before it.
    writer: str = ""
    previous: str = ""
    #: Source id (``<group>-<directory id>``) → source.
    sources: dict[str, ArchivedSource] = {}
    files: list[ArchivedFile] = []

    def find(
        self, kind: str, *, subjects: Iterable[str] | None = None, time_min: int = 0, time_max: int | None = None
    ) -> list[ArchivedFile]:
        """Files of a kind that may have rows of these subjects and times."""
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
    """The content of a manifest file; ``crc`` is the CRC-32C of the bytes of ``manifest``."""

    crc: int
    manifest: msgspec.Raw


class _ManifestVersion(msgspec.Struct, frozen=True):
    """The field of a manifest that is read before all others."""

    version: int


class Archive(ArchiveFiles):
    """The manifests of an archive, and its files."""

    def numbers(self) -> list[int]:
        """The numbers of the committed manifests that exist, ascending."""
        votes = commits.look(self)
        return sorted(number for number, writer in votes.committed.items() if (number, writer) in votes.manifests)

    def newest(self) -> tuple[int, str]:
        """Number and writer of the newest manifest; number 0: there is none."""
        votes = commits.look(self)
        return votes.newest, votes.committed.get(votes.newest, "")

    def load(self) -> ArchiveManifest:
        """The newest manifest; an empty one with number 0 where nothing was archived yet."""
        number, writer = self.newest()
        for _ in range(LOOKS_MAX):
            try:
                return self._read(number, writer) if number else ArchiveManifest()
            except ArchiveError:
                # Another archiver may have removed it since it was listed.
                before, (number, writer) = number, self.newest()
                if number == before:
                    raise
        raise ArchiveError(f"archivers replace the manifest of {self.location!r} faster than it can be read; try again")

    def open(self) -> ArchiveManifest:
        """The newest manifest; ``ArchiveError`` where there is no archive."""
        manifest = self.load()
        if not manifest.number:
            raise ArchiveError(f"{self.location!r} is not an archive: it has no {DIRECTORY}/commit-* file")
        return manifest

    def read(self, number: int) -> ArchiveManifest:
        """A committed manifest. One that cannot be read is damage: no older manifest replaces it."""
        writer = commits.look(self).committed.get(number)
        if writer is None:
            raise ArchiveError(f"{self.location!r} has no manifest {number}: it was removed or never committed")
        return self._read(number, writer)

    def _read(self, number: int, writer: str) -> ArchiveManifest:
        relative = f"{DIRECTORY}/{commits.manifest_name(number, writer)}"
        try:
            with self.files.open_input_stream(self.path(relative)) as stream:
                data = stream.read()
        except OSError as error:
            raise ArchiveError(f"{self.location}/{relative} cannot be read: {first_line(error)}") from error
        try:
            stored = msgspec.json.decode(data, type=_ManifestFile)
            raw = bytes(stored.manifest)
            if crc32c(raw) != stored.crc:
                raise ValueError("its checksum does not match")
            version = msgspec.json.decode(raw, type=_ManifestVersion).version
            if version != FORMAT_VERSION:
                raise ArchiveError(
                    f"{self.location}/{relative} has format version {version}, this Plait reads {FORMAT_VERSION}; use "
                    "the newer Plait that wrote it (nothing was changed)"
                )
            return msgspec.json.decode(raw, type=ArchiveManifest)
        except ValueError as error:
            raise ArchiveError(
                f"{self.location}/{relative} is damaged: {error}. Restore the file from a copy; the archived Parquet "
                "files are not affected"
            ) from error

    def commit(self, manifest: ArchiveManifest) -> None:
        """Commit a manifest; it is durable when this returns. Removes older manifests except the last few.

        Raises ``ArchiveConflict`` where another archiver has committed this number or a higher one.
        """
        raw = msgspec.json.encode(manifest)
        data = msgspec.json.encode(_ManifestFile(crc32c(raw), msgspec.Raw(raw)))
        self.files.create_dir(self.path(DIRECTORY), recursive=True)
        commits.commit(self, manifest.number, manifest.writer, manifest.previous, data)


def source_id(group: str, identity: str) -> str:
    """The name of a data directory in the manifest."""
    return f"{group}-{identity}"


def directory_of(kind: FileKind, date: str, subject: str = "") -> str:
    """The directory of the messages of a subject and a day, or of the events or deaths of a day."""
    return f"{kind}/subject={quote(subject, safe=_PLAIN)}/date={date}" if kind == MESSAGES else f"{kind}/date={date}"
