"""An archive as the audit reads it: Parquet files of both logs, as the manifest names them.

What only the data directory has is not judged: which subjects are strict, which logical partition a row without a key
was of, why letters died, and messages that are in no archived file yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from plait.client.rows import hash_keys
from plait.errors import ArchiveError, SubjectNotFound
from plait.frame.lp import NO_KEY_HASH, Hashes, lps_of
from plait.spark.auditing.block import Block
from plait.spark.auditing.deaths import Cause
from plait.spark.auditing.events import AUDITED, NONE, Events, of_rows, spans_of
from plait.spark.auditing.groups import GroupFacts, GroupTable
from plait.spark.auditing.input import PartitionFacts, Progress, check_groups
from plait.spark.auditing.rows import Rows
from plait.spark.manifest import ACTIONS, MESSAGES, Archive, ArchivedFile
from plait.storage.action_log import Action, ConsumerDefinition, GroupDefinition
from plait.storage.chunks import Wanted

#: Rows that one task judges at a time.
BLOCK_COUNT: Final = 1 << 20
_ROW_COLUMNS: Final = ["sequence", "key", "send_time", "store_time", "epoch"]
_EVENT_COLUMNS: Final = ["attempt", "epoch", "start", "end", "flags", "number", "log_offset", "log_row"]
_NUMBERS: Final = {action.name.lower(): int(action) for action in Action}
#: Numbers of groups are their data directory's: this keeps apart those of several.
_APART: Final = 1 << 24


@dataclass(frozen=True)
class Unit:
    """Rows of one partition in one file: sequences [low, high)."""

    path: str
    partition: int
    low: int
    high: int


@dataclass(frozen=True)
class ActionFile:
    """A file of events, and which sequences of which group it speaks of."""

    path: str
    source: int
    spans: dict[int, tuple[int, int]]


@dataclass(frozen=True)
class _Identity:
    """How the events of a group are told: by its name, between the places of two definitions."""

    source: int
    partition: str
    group: str
    first: int
    last: int


@dataclass(frozen=True)
class ArchivedInput:
    """See ``AuditInput``."""

    place: str
    wanted: Wanted
    partitions: dict[int, PartitionFacts]
    groups: dict[int, GroupFacts]
    identities: dict[int, _Identity]
    parts: list[list[Unit]]
    actions: list[ActionFile]
    begins: int
    time_min: int
    time_max: int

    def __len__(self) -> int:
        return len(self.parts)

    def blocks(self, number: int) -> Iterator[Block]:
        """The rows of some units."""
        archive = Archive.at(self.place)
        for unit in self.parts[number]:
            rows, keys = _rows(archive, unit, self)
            if len(rows):
                lookup = _Lookup(self, archive, rows)
                yield Block(unit.partition, rows, _Keys(keys).text, lookup.events_of)

    def deaths(self) -> Counter[Cause]:
        """An archive does not have the kept log."""
        return Counter()


class _Keys:
    """The keys of rows."""

    def __init__(self, keys: pa.Array) -> None:
        self._keys = keys

    def text(self, row: int) -> str:
        text: str = self._keys[row].as_py()
        return text


def _read(archive: Archive, path: str, columns: list[str], filters: Any = None) -> pa.Table:
    try:
        return pq.read_table(
            archive.path(path), columns=columns, filters=filters, filesystem=archive.files, partitioning=None
        )
    except (OSError, pa.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise ArchiveError(
            f"{archive.place}/{path} cannot be read: {reason}. See 'plait spark archive --to {archive.place} --verify'"
        ) from error


def _rows(archive: Archive, unit: Unit, source: ArchivedInput) -> tuple[Rows, pa.Array]:
    """Rows in the order of their sequences, and their keys."""
    sequence, time = pc.field("sequence"), pc.field("store_time")
    chosen = (
        (pc.field("partition") == source.partitions[unit.partition].name)
        & (sequence >= unit.low)
        & (sequence < unit.high)
        & (time >= _moment(source.wanted.time_min))
        & (time <= _moment(source.wanted.time_max))
    )
    table = _read(archive, unit.path, _ROW_COLUMNS, chosen)
    table = table.take(pc.sort_indices(table.column("sequence"))).combine_chunks()
    sequences = table.column("sequence").to_numpy()
    keys = table.column("key").combine_chunks()
    hashes = _hashes(keys)
    stored = table.column("store_time").cast(pa.int64()).to_numpy()
    sent = pc.coalesce(table.column("send_time"), table.column("store_time")).cast(pa.int64()).to_numpy()
    loose = None if keys.null_count == 0 else keys.is_null().to_numpy(zero_copy_only=False)
    lps = lps_of(sequences, hashes)
    return Rows(sequences, table.column("epoch").to_numpy(), lps, hashes, stored, sent, loose), keys


def _moment(micros: int) -> pa.Scalar:
    return pa.scalar(min(micros, (1 << 62)), pa.timestamp("us", tz="UTC"))


def _hashes(keys: pa.Array) -> Hashes | None:
    """Each different key is hashed once."""
    if keys.null_count == len(keys):
        return None
    encoded = keys.dictionary_encode()
    known = np.append(hash_keys(encoded.dictionary.to_pylist(), len(encoded.dictionary)), NO_KEY_HASH)
    hashes: Hashes = known[encoded.indices.fill_null(len(known) - 1).to_numpy()]
    return hashes


class _Lookup:
    """The events about some rows."""

    def __init__(self, source: ArchivedInput, archive: Archive, rows: Rows) -> None:
        self._source = source
        self._archive = archive
        self._low, self._high = int(rows.sequences[0]), int(rows.sequences[-1]) + 1

    def events_of(self, group: GroupFacts) -> Events:
        """In log order."""
        known = self._source.identities[group.id]
        wanted = (pc.field("partition") == known.partition) & (pc.field("consumer_group") == known.group)
        wanted &= (pc.field("start") < self._high) & (pc.field("end") > self._low)
        found = []
        for file in self._source.actions:
            low, high = file.spans.get(group.id, (0, 0))
            if low < self._high and high > self._low:
                table = _read(self._archive, file.path, ["action", "time", "value", *_EVENT_COLUMNS], wanted)
                events = events_of(table)
                found.append(of_rows(events[(events["place"] >= known.first) & (events["place"] < known.last)]))
        return np.concatenate(found) if found else NONE


def events_of(table: pa.Table) -> Events:
    """Events of an archived table, in its order; of no group yet."""
    events = np.zeros(len(table), AUDITED)
    names = table.column("action").combine_chunks().dictionary_encode()
    numbers = np.array([_NUMBERS.get(name, 0) for name in names.dictionary.to_pylist()], np.uint8)
    if len(table):
        events["action"] = numbers[names.indices.to_numpy()]
    for name in ("attempt", "epoch", "start", "end", "flags"):
        events[name] = table.column(name).to_numpy()
    events["consumer"] = table.column("number").to_numpy()
    events["time"] = table.column("time").cast(pa.int64()).to_numpy()
    events["value"] = table.column("value").fill_null(0).to_numpy()
    events["offset"] = table.column("log_offset").to_numpy()
    events["place"] = events["offset"] + table.column("log_row").to_numpy()
    return events


def open_archived(place: str, wanted: Wanted, groups: frozenset[str], *, progress: Progress) -> ArchivedInput:
    """Look at the manifest and at all events, and plan the work."""
    archive = Archive.at(place)
    manifest = archive.open()
    sources = sorted(manifest.sources)
    files = [file for file in manifest.find(MESSAGES) if wanted.names(file.subject)]
    subjects = {file.subject for file in manifest.find(MESSAGES)}
    missing = sorted(wanted.subjects - subjects)
    if missing:
        raise SubjectNotFound(f"subject {', '.join(map(repr, missing))} is not in {place}; there are {len(subjects)}")
    places = _partitions(files)
    numbers = {name: number for number, name in enumerate(places, 1)}
    partitions = {}
    for (source, name), (subject, first, last) in places.items():
        facts = manifest.sources[source]
        gaps = [(gap.start, gap.end) for gap in facts.gaps if gap.partition == name and gap.end > first]
        partitions[numbers[source, name]] = PartitionFacts(
            subject, name, first, max(last + 1, facts.sequences.get(name, 0)), gaps
        )
    learned = _Learned(archive, sources, numbers)
    actions = sorted(manifest.find(ACTIONS), key=lambda file: (file.source, file.start))
    for number, file in enumerate(actions):
        progress("reading the actions", number, len(actions))
        learned.take(file)
    there = {number: group for number, group in learned.groups().items() if group.partition in partitions}
    check_groups(groups, (group.name for group in there.values()), place)
    known = {number: group for number, group in there.items() if not groups or group.name in groups}
    for group in known.values():
        # Sealed segments of the action log may speak of messages that are not archived yet.
        group.reach = min(group.reach, partitions[group.partition].end)
    chosen = [file for file in files if file.time_max >= wanted.time_min and file.time_min <= wanted.time_max]
    times = [time for file in [*chosen, *actions] for time in (file.time_min, file.time_max)]
    begins = [file.time_min for file in actions[:1] if file.start]
    return ArchivedInput(
        place=place,
        wanted=wanted,
        partitions=partitions,
        groups=known,
        identities=learned.identities,
        parts=_parts(chosen, numbers),
        actions=learned.files,
        begins=begins[0] if begins else 0,
        time_min=max(min(times, default=0), wanted.time_min),
        time_max=max(times, default=0),
    )


def _partitions(files: list[ArchivedFile]) -> dict[tuple[str, str], tuple[str, int, int]]:
    """(source, partition) → its subject, and the first and last sequence there is."""
    found: dict[tuple[str, str], tuple[str, int, int]] = {}
    for file in files:
        for name, (first, last) in file.partitions.items():
            _, low, high = found.get((file.source, name), ("", first, last))
            found[file.source, name] = file.subject, min(low, first), max(high, last)
    return dict(sorted(found.items()))


def _parts(files: list[ArchivedFile], numbers: dict[tuple[str, str], int]) -> list[list[Unit]]:
    """Units of about ``BLOCK_COUNT`` rows, small ones together."""
    parts: list[list[Unit]] = []
    room = 0
    for file in sorted(files, key=lambda file: (file.source, file.start, file.path)):
        pieces = -(-file.count // BLOCK_COUNT)
        for name, (first, last) in file.partitions.items():
            edges = np.linspace(first, last + 1, pieces + 1).astype(np.int64).tolist()
            for low, high in pairwise(edges):
                if room <= 0:
                    parts.append([])
                    room = BLOCK_COUNT
                parts[-1].append(Unit(file.path, numbers[file.source, name], low, high))
                room -= min(file.count // pieces, high - low)
    return parts


class _Learned:
    """What all archived events say of groups, in log order."""

    def __init__(self, archive: Archive, sources: list[str], partitions: dict[tuple[str, str], int]) -> None:
        self._archive = archive
        self._sources = sources
        self._partitions = partitions
        self._tables: dict[int, GroupTable] = {}
        #: (source, partition, group) → the number of the group that has this name now.
        self._named: dict[tuple[int, str, str], int] = {}
        #: Sources of which an event was read: names before that are what the log began with.
        self._began: set[int] = set()
        self.identities: dict[int, _Identity] = {}
        self.files: list[ActionFile] = []

    def groups(self) -> dict[int, GroupFacts]:
        return {number: group for table in self._tables.values() for number, group in table.groups.items()}

    def take(self, file: ArchivedFile) -> None:
        """The next file of its source."""
        source = self._sources.index(file.source)
        table = self._tables.setdefault(source, GroupTable(whole=file.start == 0))
        columns = ["partition", "consumer_group", "detail", "action", "time", "value", *_EVENT_COLUMNS]
        found = _read(self._archive, file.path, columns)
        found = found.sort_by([("log_offset", "ascending"), ("log_row", "ascending")]).combine_chunks()
        defined = np.flatnonzero(found.column("detail").is_valid().to_numpy())
        spans: dict[int, tuple[int, int]] = {}
        for first, last in zip([0, *(defined + 1).tolist()], [*defined.tolist(), len(found)], strict=True):
            piece = found.slice(first, last - first)
            events = self._numbered(piece, source)
            if len(piece):
                self._began.add(source)
            table.take(events)
            for number, (low, high) in spans_of(events).items():
                known = spans.get(number, (low, high))
                spans[number] = min(known[0], low), max(known[1], high)
            if last < len(found):
                self._define(found.slice(last, 1), source, file.source, table)
        self.files.append(ActionFile(file.path, source, spans))

    def _numbered(self, piece: pa.Table, source: int) -> Events:
        """Events with the numbers of their groups."""
        events = events_of(piece)
        pairs = pc.binary_join_element_wise(piece.column("partition"), piece.column("consumer_group"), "\n")
        encoded = pairs.combine_chunks().dictionary_encode()
        names = [tuple(name.split("\n")) for name in encoded.dictionary.to_pylist()]
        numbers = np.array([*(self._named.get((source, *name), 0) for name in names), 0], np.uint32)
        if len(events):
            events["group"] = numbers[encoded.indices.fill_null(len(names)).to_numpy()]
        chosen: Events = events[events["group"] > 0]
        return chosen

    def _define(self, row: pa.Table, source: int, source_id: str, table: GroupTable) -> None:
        fields = row.to_pylist()[0]
        apart = source * _APART
        detail = fields["detail"].encode()
        if fields["action"] == "consumer":
            consumer = msgspec.json.decode(detail, type=ConsumerDefinition)
            table.define(ConsumerDefinition(consumer.id, consumer.group + apart, consumer.client))
            return
        definition = msgspec.json.decode(detail, type=GroupDefinition)
        name = fields["partition"]
        if name is None:
            return
        number = definition.id + apart
        place = fields["log_offset"] + fields["log_row"]
        partition = self._partitions.get((source_id, name), 0)
        table.define(
            msgspec.structs.replace(definition, id=number, partition=partition), head=source not in self._began
        )
        key = (source, name, definition.name)
        known = self._named.get(key)
        if known == number:
            return
        if known is not None:
            self.identities[known] = replace(self.identities[known], last=place)
        self._named[key] = number
        self.identities[number] = _Identity(source, name, definition.name, place, 1 << 62)
