"""An archive as the input of an audit: the Parquet files of the logs that the manifest lists.

An archive has the same facts as the data directory. Events about messages that are not archived yet are ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from plait.client.send.open_rows import hash_keys
from plait.model.logical_partitions import NO_KEY_HASH, Hashes
from plait.spark.archiving.manifest import ACTIONS, DEATHS, Archive, ArchivedFile, ArchivedSettings
from plait.spark.auditing.block import Block
from plait.spark.auditing.block_rows import BlockRows, UInt64s, slots_of
from plait.spark.auditing.events import Events
from plait.spark.auditing.group_facts import GroupFacts
from plait.spark.auditing.stored_order import astray
from plait.spark.inputs.archived_events import (
    APART,
    ActionFile,
    Identity,
    SourceEvents,
    find_events,
)
from plait.spark.inputs.archived_partitions import archived_partitions
from plait.spark.inputs.audit_input import AuditedPartition, requested_groups
from plait.spark.inputs.death_causes import Cause, archived_deaths
from plait.spark.inputs.parquet_files import read_columns
from plait.spark.inputs.work_units import Unit, parts_of
from plait.spark.runtime.job_runner import ProgressListener
from plait.storage.reading.log_chunks import WantedRows

_ROW_COLUMNS: Final = ["sequence", "message_id", "key", "send_time", "store_time", "epoch", "logical_partition"]


@dataclass(frozen=True)
class ArchivedInput:
    """The planned audit of an archive, as an ``AuditInput``."""

    place: str
    wanted: WantedRows
    partitions: dict[int, AuditedPartition]
    groups: dict[int, GroupFacts]
    identities: dict[int, Identity]
    parts: list[list[Unit]]
    actions: list[ActionFile]
    #: Settings by partition.
    settings: dict[int, ArchivedSettings]
    #: Files of dead letters, and the number that is added to the numbers of their groups (``APART``).
    letters: list[tuple[str, int]]
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
                yield Block(unit.partition, rows, partial(_text, keys), partial(self._events, archive, rows))

    def _events(self, archive: Archive, rows: BlockRows, group: GroupFacts) -> Events:
        """The events of a group about some rows, in log order."""
        between = int(rows.sequences[0]), int(rows.sequences[-1]) + 1
        return find_events(archive, self.actions, group.id, self.identities[group.id], between)

    def deaths(self) -> Counter[Cause]:
        """From the archived part of the retained log."""
        archive, total = Archive.at(self.place), Counter[Cause]()
        for path, apart in self.letters:
            total += archived_deaths(archive, path, apart, since=self.wanted.time_min, until=self.wanted.time_max)
        return total


def _rows(archive: Archive, unit: Unit, source: ArchivedInput) -> tuple[BlockRows, pa.Array]:
    """The rows in sequence order, and their keys."""
    sequence, time = pc.field("sequence"), pc.field("store_time")
    chosen = (
        (pc.field("partition") == source.partitions[unit.partition].name)
        & (sequence >= unit.low)
        & (sequence < unit.high)
        & (time >= _moment(source.wanted.time_min))
        & (time <= _moment(source.wanted.time_max))
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


def _moment(micros: int) -> pa.Scalar:
    return pa.scalar(min(micros, (1 << 62)), pa.timestamp("us", tz="UTC"))


def _hashes(keys: pa.Array) -> Hashes | None:
    """The key hashes. Each distinct key is hashed once."""
    if keys.null_count == len(keys):
        return None
    encoded = keys.dictionary_encode()
    known = np.append(hash_keys(encoded.dictionary.to_pylist(), len(encoded.dictionary)), NO_KEY_HASH)
    hashes: Hashes = known[encoded.indices.fill_null(len(known) - 1).to_numpy()]
    return hashes


def open_archived(place: str, wanted: WantedRows, groups: frozenset[str], progress: ProgressListener) -> ArchivedInput:
    """Read the manifest and all events, and plan the work."""
    archive = Archive.at(place)
    manifest = archive.open()
    sources = sorted(manifest.sources)
    found = archived_partitions(manifest, wanted, place)
    partitions = {number: each.facts for number, each in found.items()}
    learned = [
        SourceEvents(
            archive,
            index,
            [left.offset for left in manifest.sources[source].left_out if left.log == "action"],
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
    known = requested_groups(there, partitions, groups, place)
    for group in known.values():
        partition = found[group.partition]
        group.learn_order(partition.settings.order)
        if not partition.complete:
            group.reach = min(group.reach, partition.facts.end)
    chosen = {number: (each.facts.name, _stored_between(each.files, wanted)) for number, each in found.items()}
    files = [file for _, members in chosen.values() for file in members]
    times = [time for file in [*files, *actions] for time in (file.time_min, file.time_max)]
    return ArchivedInput(
        place=place,
        wanted=wanted,
        partitions=partitions,
        groups=known,
        identities={number: known for events in learned for number, known in events.identities.items()},
        parts=parts_of(chosen),
        actions=[file for events in learned for file in events.files],
        settings={number: each.settings for number, each in found.items()},
        letters=[(file.path, sources.index(file.source) * APART) for file in manifest.find(DEATHS)],
        time_min=max(min(times, default=0), wanted.time_min),
        time_max=max(times, default=0),
    )


def _stored_between(files: list[ArchivedFile], wanted: WantedRows) -> list[ArchivedFile]:
    return [file for file in files if file.time_max >= wanted.time_min and file.time_min <= wanted.time_max]
