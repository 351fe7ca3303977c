"""The events of an archive: read once in log order for facts about whole groups, and by file for single rows.

Files may overlap: a part of the log that two days share is in a file of each day, and a file that was merged from small
ones may span a larger file between them. Where events of a log are missing (retention was faster than the archiver, or
damage was left out), groups are judged by the events after the gap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from plait.spark.archiving.manifest import Archive, ArchivedFile
from plait.spark.auditing.block_arrays import AUDITED, NONE, Events, of_rows, spans_of
from plait.spark.auditing.group_facts import GroupFacts, GroupTable
from plait.spark.auditing.verdicts import NEVER
from plait.spark.inputs.parquet_files import read_columns
from plait.storage.logs.action_events import Action
from plait.storage.logs.action_log import ConsumerDefinition, GroupDefinition

_EVENT_COLUMNS: Final = ["attempt", "epoch", "start", "end", "flags", "number", "log_offset", "log_row"]
_NUMBERS: Final = {action.name.lower(): int(action) for action in Action}
#: Group and partition numbers are unique in their data directory only. This much, times the number of the directory, is
#: added to them.
APART: Final = 1 << 24
#: The column with the number of the file that a row is from.
_FILE: Final = "file"


@dataclass(frozen=True)
class ActionFile:
    """A file of events, and for each group the range of sequences that its events name."""

    path: str
    spans: dict[int, tuple[int, int]]


@dataclass(frozen=True)
class Identity:
    """Identifies the events of a group: by its name, between the places of two definitions of that name."""

    partition: str
    group: str
    first: int
    last: int


def events_of(table: pa.Table) -> Events:
    """The events of an archived table, in its order. The group number is not set yet."""
    events = np.zeros(len(table), AUDITED)
    names = table.column("action").combine_chunks().dictionary_encode()
    numbers = np.array([_NUMBERS.get(name, 0) for name in names.dictionary.to_pylist()], np.uint8)
    if len(table):
        events["action"] = numbers[names.indices.to_numpy()]
    for name in ("attempt", "epoch", "start", "end"):
        events[name] = table.column(name).to_numpy()
    events["flag"] = table.column("flags").to_numpy() != 0
    events["holder"] = table.column("number").to_numpy()
    events["time"] = table.column("time").cast(pa.int64()).to_numpy()
    events["value"] = table.column("value").fill_null(0).to_numpy()
    events["offset"] = table.column("log_offset").to_numpy()
    events["place"] = events["offset"] + table.column("log_row").to_numpy()
    return events


def find_events(
    archive: Archive, files: Iterable[ActionFile], group: int, known: Identity, rows: tuple[int, int]
) -> Events:
    """The events of a group about rows [low, high), in log order. The files may be in any order."""
    low, high = rows
    wanted = (pc.field("partition") == known.partition) & (pc.field("consumer_group") == known.group)
    wanted &= (pc.field("start") < high) & (pc.field("end") > low)
    found = []
    for file in files:
        first, end = file.spans.get(group, (0, 0))
        if first < high and end > low:
            table = read_columns(archive, file.path, ["action", "time", "value", *_EVENT_COLUMNS], wanted)
            events = events_of(table)
            found.append(of_rows(events[(events["place"] >= known.first) & (events["place"] < known.last)]))
    if not found:
        return NONE
    events = np.concatenate(found)
    in_order: Events = events[np.argsort(events["place"], kind="stable")]
    return in_order


class SourceEvents:
    """Learns the groups of one data directory from its archived events. ``take`` its files in order of their start."""

    def __init__(self, archive: Archive, number: int, lost: Iterable[int]) -> None:
        """``lost``: log offsets at which events are missing."""
        self._archive = archive
        self._apart = number * APART
        self._lost = sorted(set(lost))
        self._table = GroupTable()
        #: (partition, group) → the number of the group that has this name now.
        self._named: dict[tuple[str, str], int] = {}
        #: True if an event was read since the start of the log or the last gap. Definitions before the first event are
        #: the definitions of a segment header.
        self._began = False
        #: Rows that wait, as a later file may have rows that precede them in the log.
        self._waiting: pa.Table | None = None
        self.files: list[ActionFile] = []
        self.identities: dict[int, Identity] = {}

    @property
    def groups(self) -> dict[int, GroupFacts]:
        return self._table.groups

    def take(self, file: ArchivedFile, following: int | None) -> None:
        """Read the next file. ``following``: the log offset at which the file after it starts."""
        if not self.files and file.start:
            # The log before this file was not archived.
            self._lost = sorted({file.start, *self._lost})
        columns = ["partition", "consumer_group", "detail", "action", "time", "value", *_EVENT_COLUMNS]
        found = read_columns(self._archive, file.path, columns)
        found = found.append_column(_FILE, pa.array(np.full(len(found), len(self.files))))
        self.files.append(ActionFile(file.path, {}))
        if self._waiting is not None:
            found = pa.concat_tables([self._waiting, found])
        found = found.sort_by([("log_offset", "ascending"), ("log_row", "ascending")]).combine_chunks()
        offsets = found.column("log_offset").to_numpy()
        ready = len(found) if following is None else int(np.searchsorted(offsets, following))
        self._waiting = found.slice(ready) if ready < len(found) else None
        self._take_rows(found.slice(0, ready))
        if following is None and self._lost:
            # There are no events after the gap.
            self._table.cut(NEVER)

    def _take_rows(self, found: pa.Table) -> None:
        """Process the next rows of the log."""
        offsets, times = found.column("log_offset").to_numpy(), found.column("time").cast(pa.int64())
        passed = [offset for offset in self._lost if len(offsets) and offset <= offsets[-1]]
        self._lost = self._lost[len(passed) :]
        cuts = np.unique(np.searchsorted(offsets, passed)).tolist()
        defined = np.flatnonzero(found.column("detail").is_valid().to_numpy()).tolist()
        at = 0
        for index, is_definition in sorted([*((cut, False) for cut in cuts), *((row, True) for row in defined)]):
            self._take_events(found.slice(at, index - at))
            at = index
            if is_definition:
                self._define(found.slice(index, 1))
                at += 1
            else:
                self._table.cut(times[index].as_py())
                self._began = False
        self._take_events(found.slice(at))

    def _take_events(self, piece: pa.Table) -> None:
        if not len(piece):
            return
        self._began = True
        events, files = self._numbered(piece)
        self._table.take(events)
        for file in np.unique(files).tolist():
            spans = self.files[file].spans
            for number, (low, high) in spans_of(events[files == file]).items():
                known = spans.get(number, (low, high))
                spans[number] = min(known[0], low), max(known[1], high)

    def _numbered(self, piece: pa.Table) -> tuple[Events, Any]:
        """Events with the numbers of their groups, and the file of each."""
        events = events_of(piece)
        pairs = pc.binary_join_element_wise(piece.column("partition"), piece.column("consumer_group"), "\n")
        encoded = pairs.combine_chunks().dictionary_encode()
        names = [tuple(name.split("\n")) for name in encoded.dictionary.to_pylist()]
        numbers = np.array([*(self._named.get((name[0], name[1]), 0) for name in names), 0], np.uint32)
        events["group"] = numbers[encoded.indices.fill_null(len(names)).to_numpy()]
        known = events["group"] > 0
        return events[known], piece.column(_FILE).to_numpy()[known]

    def _define(self, row: pa.Table) -> None:
        fields = row.to_pylist()[0]
        detail = fields["detail"].encode()
        if fields["action"] == "consumer":
            consumer = msgspec.json.decode(detail, type=ConsumerDefinition)
            self._table.define(ConsumerDefinition(consumer.id, consumer.group + self._apart, consumer.client))
            return
        definition = msgspec.json.decode(detail, type=GroupDefinition)
        name = fields["partition"]
        if name is None:
            return
        number = definition.id + self._apart
        place = fields["log_offset"] + fields["log_row"]
        # The definition has the partition's number in the data directory: it tells partitions of one name apart.
        partition = definition.partition + self._apart
        self._table.define(msgspec.structs.replace(definition, id=number, partition=partition), head=not self._began)
        key = (name, definition.name)
        known = self._named.get(key)
        if known == number:
            return
        if known is not None:
            self.identities[known] = replace(self.identities[known], last=place)
        self._named[key] = number
        self.identities[number] = Identity(name, definition.name, place, NEVER)
