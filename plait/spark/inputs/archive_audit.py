"""An archive as the input of an audit: the Parquet files of the logs that the manifest lists.

An archive has the same facts as the data directory. Events about messages that are not archived yet are ignored.

Several partitions may have had the same name, one after another. When a subject is deleted and created again, or gets
back a partition that was retired, the new partition starts at sequence 0 and its groups are new. An archive has the
rows of each of these *lives* of a name. Partitions without messages are judged too: their groups' events may name some.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, zip_longest
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from plait.client.send.open_rows import hash_keys
from plait.errors import ArchiveError
from plait.frame.header import TIME_MAX
from plait.model.logical_partitions import NO_KEY_HASH, Hashes
from plait.spark.archiving.manifest import (
    ACTIONS,
    DEATHS,
    MESSAGES,
    RAW,
    Archive,
    ArchivedFile,
    ArchivedSettings,
    ArchivedSource,
    ArchiveManifest,
)
from plait.spark.auditing.block import Block
from plait.spark.auditing.block_arrays import BlockRows, Events, UInt64s, merged, slots_of, without
from plait.spark.auditing.group_facts import GroupFacts
from plait.spark.auditing.stored_order import astray
from plait.spark.inputs.archive_input import ArchivedLife, lives_of
from plait.spark.inputs.archived_events import APART, ActionFile, Identity, SourceEvents, find_events
from plait.spark.inputs.audit_input import AuditedPartition, AuditInput, Cause, requested_groups
from plait.spark.inputs.parquet_files import read_columns
from plait.spark.runtime.job_runner import ProgressListener
from plait.storage.reading.log_chunks import WantedRows, check_names

_ROW_COLUMNS: Final = ["sequence", "message_id", "key", "send_time", "store_time", "epoch", "logical_partition"]
_TIME: Final = pa.timestamp("us", tz="UTC")
_CAUSE_COLUMNS: Final = ["group_number", "type", "handler"]
#: Rows that one task judges at a time.
BLOCK_COUNT: Final = 1 << 20


@dataclass(frozen=True)
class Unit:
    """Rows of one partition: sequences [low, high) of some files."""

    paths: tuple[str, ...]
    partition: int
    low: int
    high: int


@dataclass(frozen=True)
class ArchivedInput(AuditInput):
    """The planned audit of an archive."""

    identities: dict[int, Identity]
    parts: list[list[Unit]]
    actions: list[ActionFile]
    #: Settings by partition.
    settings: dict[int, ArchivedSettings]
    #: Files of dead letters, and the number that is added to the numbers of their groups (``APART``).
    letters: list[tuple[str, int]]

    def __len__(self) -> int:
        return len(self.parts)

    def blocks(self, number: int) -> Iterator[Block]:
        """The rows of some units."""
        archive = Archive.at(self.place)
        for unit in self.parts[number]:
            rows, keys = _rows(archive, unit, self)
            if len(rows):
                yield Block(unit.partition, rows, partial(_text, keys), partial(self._events, archive, rows))

    def _events(self, archive: Archive, rows: BlockRows, group: GroupFacts) -> Events:
        """The events of a group about some rows, in log order."""
        between = int(rows.sequences[0]), int(rows.sequences[-1]) + 1
        return find_events(archive, self.actions, group.id, self.identities[group.id], between)

    def deaths(self) -> Counter[Cause]:
        """From the archived part of the retained log."""
        archive, total = Archive.at(self.place), Counter[Cause]()
        for path, apart in self.letters:
            table = read_columns(archive, path, [*_CAUSE_COLUMNS, "store_time"])
            time = table.column("store_time").cast(pa.int64())
            chosen = pc.and_(pc.greater_equal(time, self.wanted.time_min), pc.less_equal(time, self.wanted.time_max))
            counts = table.filter(chosen).group_by(_CAUSE_COLUMNS).aggregate([([], "count_all")])
            columns = [counts.column(name).to_pylist() for name in (*_CAUSE_COLUMNS, "count_all")]
            for number, kind, handler, count in zip(*columns, strict=True):
                total[Cause(number + apart, kind or "", handler or "")] += count
        return total


def _rows(archive: Archive, unit: Unit, source: ArchivedInput) -> tuple[BlockRows, pa.Array]:
    """The rows in sequence order, and their keys."""
    sequence, time = pc.field("sequence"), pc.field("store_time")
    chosen = (
        (pc.field("partition") == source.partitions[unit.partition].name)
        & (sequence >= unit.low)
        & (sequence < unit.high)
        & (time >= pa.scalar(source.wanted.time_min, _TIME))
        & (time <= pa.scalar(min(source.wanted.time_max, 1 << 62), _TIME))
    )
    table = pa.concat_tables([read_columns(archive, path, _ROW_COLUMNS, chosen) for path in unit.paths])
    table = table.take(pc.sort_indices(table.column("sequence"))).combine_chunks()
    sequences = table.column("sequence").to_numpy()
    keys = table.column("key").combine_chunks()
    hashes = _hashes(keys)
    stored = table.column("store_time").cast(pa.int64()).to_numpy()
    sent = pc.coalesce(table.column("send_time"), table.column("store_time")).cast(pa.int64()).to_numpy()
    slots = table.column("logical_partition").combine_chunks()
    keyless = slots.is_null().to_numpy(zero_copy_only=False)
    settings = source.settings[unit.partition]
    # A message's LP may differ from the LP of its key, because it comes from the hash that the message was sent with.
    lps = slots_of(sequences, hashes, settings.taken)
    lps = np.where(keyless, lps, slots.fill_null(0).to_numpy()).astype(lps.dtype)
    rows = BlockRows(
        sequences,
        table.column("epoch").to_numpy(),
        lps,
        hashes,
        stored,
        sent,
        ids=_ids(table.column("message_id")),
        unordered=np.zeros(len(sequences), bool),
        astray=astray(sequences, lps, settings.taken, settings.fences),
    )
    return rows, keys


def _text(keys: pa.Array, row: int) -> str:
    text: str = keys[row].as_py()
    return text


def _ids(texts: pa.ChunkedArray) -> tuple[UInt64s, UInt64s]:
    """Producer ids and producer sequences. A message id is 16 hexadecimal digits, a hyphen and a decimal number."""
    digits = pc.utf8_slice_codeunits(texts, 0, 16).combine_chunks()
    codes = np.frombuffer(digits.buffers()[2], np.uint8, 16 * len(digits), 16 * digits.offset).reshape(-1, 8, 2)
    nibbles = np.where(codes >= ord("a"), codes - (ord("a") - 10), codes - ord("0"))
    producers = (nibbles[:, :, 0] * 16 + nibbles[:, :, 1]).astype(np.uint8).copy().view(">u8").ravel()
    numbers = pc.utf8_slice_codeunits(texts, 17).cast(pa.uint64()).to_numpy()
    return producers.astype(np.uint64), numbers


def _hashes(keys: pa.Array) -> Hashes:
    """The key hashes. Each distinct key is hashed once."""
    encoded = keys.dictionary_encode()
    known = np.append(hash_keys(encoded.dictionary.to_pylist(), len(encoded.dictionary)), NO_KEY_HASH)
    hashes: Hashes = known[encoded.indices.fill_null(len(known) - 1).to_numpy()]
    return hashes


# --- partitions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArchivedPartition:
    """A partition as the manifest describes it."""

    facts: AuditedPartition
    files: list[ArchivedFile]
    settings: ArchivedSettings
    #: Each message that an archived event can name is archived or listed as missing.
    complete: bool


def archived_partitions(manifest: ArchiveManifest, wanted: WantedRows, place: str) -> dict[int, ArchivedPartition]:
    """The requested partitions by number: the number in the data directory, plus ``APART`` per directory before it.

    Raises ``SubjectNotFound`` for a subject that is not in the archive, and ``ArchiveError`` for an archive that has
    only copies of segments.
    """
    sources = sorted(manifest.sources)
    raw = [name for name in sources if manifest.sources[name].raw]
    messages = manifest.find(MESSAGES)
    if raw and not messages and not manifest.find(ACTIONS):
        raise ArchiveError(
            f"archive {place} has only copies of segments (--raw); audit them as a data directory: "
            f"--data {place}/{RAW}/{raw[0]}"
        )
    settings_of = [each for source in manifest.sources.values() for each in source.settings.values()]
    subjects = {file.subject for file in messages} | {each.subject for each in settings_of if not each.deleted}
    check_names(place, wanted, subjects)
    found: dict[int, ArchivedPartition] = {}
    for (name, _, number), archived in lives_of(manifest, wanted, place).items():
        found[number + sources.index(name) * APART] = _with_files(manifest.sources[name], archived, wanted)
    for index, name in enumerate(sources):
        source = manifest.sources[name]
        for partition, settings in source.settings.items():
            number = settings.number + index * APART
            if not settings.deleted and wanted.names(settings.subject) and number not in found:
                found[number] = _without_files(source, partition, settings)
    return dict(sorted(found.items()))


def _with_files(source: ArchivedSource, archived: ArchivedLife, wanted: WantedRows) -> ArchivedPartition:
    name, life = archived.partition, archived.life
    now = source.settings[name]
    current = now.number == life.number
    settings = now if current else next(each for each in source.former if each.number == life.number)
    first = min(file.partitions[name][0] for file in archived.files)
    end = max(life.end, _next(source, name, settings))
    gaps = [gap for gap in source.gaps if gap.partition == name and gap.number == life.number]
    # Rows that retention removed before they were archived are not missing.
    expired = [(gap.start, gap.end) for gap in gaps if gap.expired]
    from_zero = any(not gap.start and not gap.expired for gap in gaps)
    missing = without([(0 if from_zero else life.start, end)], [*life.ranges, *expired])
    all_times = wanted.time_min == 0 and wanted.time_max == TIME_MAX
    readable = sum(last - first for first, last in merged(life.ranges)) if all_times else 0
    facts = AuditedPartition(archived.subject, name, first, end, missing, readable)
    return ArchivedPartition(facts, archived.files, settings, current and source.has_all_of(name))


def _without_files(source: ArchivedSource, name: str, settings: ArchivedSettings) -> ArchivedPartition:
    # Rows that were removed before they were archived are neither missing nor invented.
    first, end = 0, _next(source, name, settings) if settings.whole else 0
    # The log had messages and none of them could be read.
    for life in source.lives.get(name, []):
        if life.number == settings.number:
            first, end = 0 if settings.whole else life.start, max(life.end, end)
    missing = [(first, end)] if first < end else []
    facts = AuditedPartition(settings.subject, name, first, end, missing)
    return ArchivedPartition(facts, [], settings, settings.whole and source.has_all_of(name))


def _next(source: ArchivedSource, name: str, settings: ArchivedSettings) -> int:
    """The next sequence of the archived log. 0: retention removed rows that were not archived."""
    return 0 if name in source.overtaken else settings.next


# --- units of work ------------------------------------------------------------------------------


@dataclass
class _Stretch:
    """Files of one partition whose sequences interleave: rows of one file lie between rows of another."""

    files: list[ArchivedFile]
    #: The first and the last sequence.
    first: int
    last: int
    #: The log offset after the last row.
    end: int

    def meets(self, other: _Stretch) -> bool:
        return self.first <= other.last and other.first <= self.last

    def join(self, other: _Stretch) -> None:
        self.files += other.files
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.end = max(self.end, other.end)


def _stretches(files: list[ArchivedFile], name: str) -> list[_Stretch]:
    """The stretches of one partition, in order of their start in the log."""
    found: list[_Stretch] = []
    near: list[_Stretch] = []
    for file in sorted(files, key=lambda file: (file.start, file.path)):
        new = _Stretch([file], *file.partitions[name], file.end)
        # Stretches that end before this file in the log also have lower sequences.
        near = [other for other in near if other.end > file.start]
        same = [other for other in near if other.meets(new)]
        near = [other for other in near if other not in same[1:]]
        if not same:
            near.append(new)
            found.append(new)
            continue
        for other in [*same[1:], new]:
            same[0].join(other)
            other.files = []
    return [each for each in found if each.files]


def parts_of(files: Mapping[int, tuple[str, list[ArchivedFile]]]) -> list[list[Unit]]:
    """Parts of about ``BLOCK_COUNT`` rows; small units share a part. Each unit has all rows of its sequences.

    ``files``: partition → its name, and the files with its rows.
    """
    parts: list[list[Unit]] = []
    room = 0
    for number, (name, members) in files.items():
        for stretch in _stretches(members, name):
            count = min(sum(file.count for file in stretch.files), stretch.last + 1 - stretch.first)
            pieces = -(-count // BLOCK_COUNT)
            edges = np.linspace(stretch.first, stretch.last + 1, pieces + 1).astype(np.int64).tolist()
            for low, high in pairwise(edges):
                if room <= 0:
                    parts.append([])
                    room = BLOCK_COUNT
                there = [(file.path, file.partitions[name]) for file in stretch.files]
                paths = tuple(path for path, (first, last) in there if first < high and last >= low)
                parts[-1].append(Unit(paths, number, low, high))
                room -= min(count // pieces, high - low)
    return parts


# --- planning -----------------------------------------------------------------------------------


def open_archived(place: str, wanted: WantedRows, groups: frozenset[str], progress: ProgressListener) -> ArchivedInput:
    """Read the manifest and all events, and plan the work."""
    archive = Archive.at(place)
    manifest = archive.open()
    sources = sorted(manifest.sources)
    found = archived_partitions(manifest, wanted, place)
    learned = [
        SourceEvents(
            archive, index, [left.offset for left in manifest.sources[source].left_out if left.log == "action"]
        )
        for index, source in enumerate(sources)
    ]
    actions = sorted(manifest.find(ACTIONS), key=lambda file: (file.source, file.start))
    progress.step("reading the actions", len(actions), "parts")
    for number, (file, following) in enumerate(zip_longest(actions, actions[1:])):
        progress.update(number)
        same_source = following is not None and following.source == file.source
        learned[sources.index(file.source)].take(file, following.start if same_source else None)
    there = {number: group for events in learned for number, group in events.groups.items()}
    known = requested_groups(there, found, groups, place)
    for group in known.values():
        partition = found[group.partition]
        group.learn_order(partition.settings.order)
        if not partition.complete:
            group.reach = min(group.reach, partition.facts.end)
    chosen = {}
    times = [time for file in actions for time in (file.time_min, file.time_max)]
    for number, each in found.items():
        files = [file for file in each.files if file.time_max >= wanted.time_min and file.time_min <= wanted.time_max]
        times += [time for file in files for time in (file.time_min, file.time_max)]
        chosen[number] = each.facts.name, files
    return ArchivedInput(
        place=place,
        wanted=wanted,
        partitions={number: each.facts for number, each in found.items()},
        groups=known,
        identities={number: known for events in learned for number, known in events.identities.items()},
        parts=parts_of(chosen),
        actions=[file for events in learned for file in events.files],
        settings={number: each.settings for number, each in found.items()},
        letters=[(file.path, sources.index(file.source) * APART) for file in manifest.find(DEATHS)],
        time_min=max(min(times, default=0), wanted.time_min),
        time_max=max(times, default=0),
    )
