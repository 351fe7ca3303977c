"""``spark.read.format("plait")``: the messages of a data directory as a DataFrame, read from the segment files.

The driver plans by frame headers alone; each task maps its part of one segment file, verifies the frames and hands
their columns to Spark. The files are never changed, and may be in use by a server. docs/spark.md tells users more.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    Filter,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import StructField, StructType

from plait import names
from plait.errors import FrameError, InvalidArgument
from plait.spark.columns import COLUMNS, record_batches
from plait.spark.filters import narrow
from plait.spark.worker import prepare_worker
from plait.storage.chunks import Chunk, Wanted, plan, read_chunk
from plait.storage.disk import RealDisk
from plait.storage.reader import damage_error, open_log

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("plait.spark")

DEFAULT_GROUP = "g1"
_OPTIONS = ("path", "subject", "columns", "group", "minPartitions", "failOnDamage")


@dataclass(frozen=True)
class ReadOptions:
    """What a user asked for, checked."""

    path: str
    wanted: Wanted
    columns: tuple[str, ...]
    group: str
    partitions_min: int
    fail_on_damage: bool

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> ReadOptions:
        """Spark's options, whose names know no case; ``InvalidArgument`` says what is wrong with them."""
        known = {name.lower(): name for name in _OPTIONS}
        for name in given:
            if name.lower() not in known:
                raise InvalidArgument(f"option {name!r} is not known; there are {', '.join(_OPTIONS)}")
        options = {known[name.lower()]: value for name, value in given.items()}
        return cls(
            path=_required(options, "path", 'the data directory, as in .option("path", "data")'),
            wanted=_wanted(_required(options, "subject", "a name, several with commas between, or a prefix and *")),
            columns=_columns(options.get("columns")),
            group=names.check("group", options.get("group", DEFAULT_GROUP)),
            partitions_min=_partitions_min(options.get("minPartitions")),
            fail_on_damage=_flag("failOnDamage", options.get("failOnDamage", "true")),
        )


class PlaitDataSource(DataSource):
    """The source as Spark knows it; registered by ``plait.spark.session`` and ``plait.spark.register``."""

    @classmethod
    def name(cls) -> str:
        """What stands in ``format(...)``."""
        return "plait"

    def schema(self) -> StructType:
        """The columns asked for; what is wrong with the options or the directory is said here, at ``load``."""
        prepare_worker()
        options = ReadOptions.parse(self.options)
        open_log(options.path)
        return StructType([_field(name) for name in options.columns])

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of these columns; a schema that the user gave may leave some out."""
        _check_schema(schema)
        return PlaitReader(ReadOptions.parse(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """A writer of these columns to a server; Spark looks at the names of the parameters."""
        from plait.spark.sink import PlaitWriter

        return PlaitWriter(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """The same for streaming queries."""
        from plait.spark.sink import PlaitStreamWriter

        return PlaitStreamWriter(self.options, schema, overwrite=overwrite)


class PlaitReader(DataSourceReader):
    """Plans and reads. Pickled to the tasks, with what filters have narrowed it to."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.wanted = options.wanted
        self.arrow_schema: pa.Schema = to_arrow_schema(schema, timezone="UTC")

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Leave out frames that cannot match; Spark still looks at every row that is read."""
        for condition in filters:
            self.wanted = narrow(self.wanted, condition, self.options.group)
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """One for each task."""
        prepare_worker()
        options = self.options
        planned = plan(
            open_log(options.path),
            self.wanted,
            chunks_min=options.partitions_min,
            fail_on_damage=options.fail_on_damage,
        )
        if planned.damages:
            size = sum(damage.size for damage in planned.damages)
            log.warning("%s: %d damaged bytes are left out; run 'plait doctor'", options.path, size)
        return [InputPartition(chunk) for chunk in planned.chunks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one chunk. Without any chunk Spark calls this once all the same."""
        chunk: Chunk | None = partition.value
        if chunk is None:
            return
        prepare_worker()
        options = self.options
        frames = read_chunk(
            RealDisk(options.path, read_only=True),
            options.path,
            chunk,
            self.wanted,
            fail_on_damage=options.fail_on_damage,
        )
        try:
            yield from record_batches(frames, self.arrow_schema, options.group)
        except FrameError as error:
            size = chunk.end - chunk.start
            raise damage_error(options.path, chunk.segment, chunk.start, size, str(error)) from error


def _required(options: Mapping[str, str], name: str, what: str) -> str:
    value = options.get(name, "").strip()
    if not value:
        raise InvalidArgument(f"option {name!r} is missing: {what}")
    return value


def _wanted(subjects: str) -> Wanted:
    exact, prefixes = set(), []
    for part in subjects.split(","):
        name = part.strip()
        if name.endswith("*"):
            prefixes.append(name[:-1])
        else:
            exact.add(names.check("subject", name))
    return Wanted(frozenset(exact), tuple(prefixes))


def _columns(given: str | None) -> tuple[str, ...]:
    if given is None:
        return tuple(COLUMNS)
    columns = tuple(part.strip() for part in given.split(","))
    for column in columns:
        if column not in COLUMNS:
            raise InvalidArgument(f"column {column!r} is not known; there are {', '.join(COLUMNS)}")
    if len(set(columns)) < len(columns):
        raise InvalidArgument(f"columns {given!r} name one twice")
    return columns


def _partitions_min(given: str | None) -> int:
    if given is None:
        # In local mode what there is to share the work; elsewhere a beginning.
        return os.cpu_count() or 1
    if not given.isdigit() or not int(given):
        raise InvalidArgument(f"minPartitions {given!r} is not a number of 1 or more")
    return int(given)


def _flag(name: str, given: str) -> bool:
    if given.lower() not in ("true", "false"):
        raise InvalidArgument(f"{name} {given!r} is neither true nor false")
    return given.lower() == "true"


def _field(name: str) -> StructField:
    column = COLUMNS[name]
    return StructField(name, from_arrow_type(column.type), column.nullable)


def _check_schema(schema: StructType) -> None:
    for field in schema.fields:
        if field.name not in COLUMNS:
            raise InvalidArgument(f"column {field.name!r} is not known; there are {', '.join(COLUMNS)}")
        ours = _field(field.name)
        if field.dataType != ours.dataType:
            kinds = ours.dataType.simpleString(), field.dataType.simpleString()
            raise InvalidArgument(f"column {field.name!r} is {kinds[0]}, not {kinds[1]}")
        if ours.nullable and not field.nullable:
            raise InvalidArgument(f"column {field.name!r} may be null")
