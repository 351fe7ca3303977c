"""``spark.read.format("plait")``: messages as a DataFrame, from a data directory, through brokers or from an archive.

The driver plans from frame headers, consume logs or a manifest; each task reads its part, verifies the frames and
passes their columns to Spark. Files are never changed, and may be in use by a server. docs/spark.md is the user guide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema, to_arrow_type
from pyspark.sql.types import StructField, StructType

from plait.client.read.surveyor import Surveyor
from plait.errors import InvalidArgument
from plait.spark.inputs.archive_input import ArchiveInput, check_archive, is_archive
from plait.spark.inputs.log_input import LogInput
from plait.spark.runtime.worker import prepare_worker
from plait.spark.source.filters import joined_filter, narrow
from plait.spark.source.range_planning import batch_ranges, input_of, read_task
from plait.spark.source.read_options import ReadOptions
from plait.spark.source.spark_columns import COLUMNS
from plait.spark.source.stream_reader import PlaitStreamReader
from plait.spark.source.typed_headers import KINDS, PREFIX, is_header
from plait.storage.reading.log_reader import open_log


class PlaitDataSource(DataSource):
    """The data source; ``plait.spark.session`` and ``plait.spark.register`` register it with Spark."""

    @classmethod
    def name(cls) -> str:
        """The argument of ``format(...)``."""
        return "plait"

    def schema(self) -> StructType:
        """The wanted columns. Spark calls this at ``load``, so wrong options or a wrong directory fail here."""
        prepare_worker()
        options = ReadOptions.parse(self.options)
        _check_input(options)
        return StructType([_field(name, options.headers.get(name)) for name in options.columns])

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of these columns; a schema from the user may have fewer than the source."""
        _check_schema(schema)
        return PlaitReader(ReadOptions.parse(self.options).check_use(stream=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """A reader of these columns for ``readStream``."""
        _check_schema(schema)
        return PlaitStreamReader(ReadOptions.parse(self.options).check_use(stream=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """A writer of these columns to a server. Spark passes the parameters by name."""
        from plait.spark.sink.writer import PlaitWriter

        return PlaitWriter(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """A writer of these columns for streaming queries."""
        from plait.spark.sink.writer import PlaitStreamWriter

        return PlaitStreamWriter(self.options, schema, overwrite=overwrite)


class PlaitReader(DataSourceReader):
    """Plans and reads a batch query; pickled to the tasks together with the pushed filters."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.wanted = options.wanted
        self.arrow_schema: pa.Schema = to_arrow_schema(schema, timezone="UTC")

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Narrow the read to frames and rows that can match; Spark still applies all filters to the rows."""
        group = None if self.options.server or _is_archive(self.options) else self.options.group
        for condition in filters:
            self.wanted = narrow(self.wanted, condition, group)
        self.wanted = replace(self.wanted, filter=joined_filter(self.wanted.filter, filters, self.arrow_schema))
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """One input partition for each task."""
        prepare_worker()
        options = self.options
        source = input_of(options, self.wanted)
        try:
            if isinstance(source, LogInput | ArchiveInput) and options.whole:
                tasks: list[Any] = source.all_tasks(options.tasks_min())
            else:
                ranges, spans = batch_ranges(source, options, self.wanted)
                tasks = source.tasks(ranges, spans, options.tasks_min())
        finally:
            source.close()
        return [InputPartition(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task. If there is no task, Spark calls this once with none."""
        return read_task(partition.value, self.options, self.wanted, self.arrow_schema)


def _is_archive(options: ReadOptions) -> bool:
    return bool(options.path) and is_archive(options.path)


def _check_input(options: ReadOptions) -> None:
    """Check that the input can be read before anything is planned."""
    if options.server:
        # Checks the addresses; the planning connects.
        Surveyor(options.server)
    elif _is_archive(options):
        check_archive(options)
    else:
        open_log(options.path)


def _field(name: str, header: pa.DataType | None = None) -> StructField:
    if header is not None:
        return StructField(name, from_arrow_type(header))
    column = COLUMNS[name]
    return StructField(name, from_arrow_type(column.type), column.nullable)


def _check_schema(schema: StructType) -> None:
    for field in schema.fields:
        if field.name not in COLUMNS:
            _check_header(field)
            continue
        ours = _field(field.name)
        if field.dataType != ours.dataType:
            kinds = ours.dataType.simpleString(), field.dataType.simpleString()
            raise InvalidArgument(f"column {field.name!r} is {kinds[0]}, not {kinds[1]}")
        if ours.nullable and not field.nullable:
            raise InvalidArgument(f"column {field.name!r} can be null: make it nullable in the schema")


def _check_header(field: StructField) -> None:
    if not field.name.startswith(PREFIX):
        raise InvalidArgument(
            f"unknown column {field.name!r}; the columns are {', '.join(COLUMNS)}, and {PREFIX}NAME for the header NAME"
        )
    if not is_header(field.name, to_arrow_type(field.dataType)) or not field.nullable:
        kinds = ", ".join(KINDS)
        raise InvalidArgument(
            f"column {field.name!r} is {field.dataType.simpleString()}; a header is a nullable column of one of {kinds}"
        )
