"""Parses and checks the options of ``spark.read`` and ``spark.readStream``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import unquote

import pyarrow as pa

from plait.clock import Clock, SystemClock
from plait.errors import InvalidArgument
from plait.filter.message_filter import compile_filter
from plait.model import names
from plait.model.filter_terms import FilterTerms, filter_terms
from plait.spark.source.offsets import EARLIEST, LATEST, Bound, parse_bound
from plait.spark.source.spark_columns import COLUMNS
from plait.spark.source.typed_headers import parse_headers
from plait.storage.reading.log_chunks import WantedRows

DEFAULT_GROUP: Final = "g1"
_OPTIONS: Final = (
    "path",
    "server",
    "subject",
    "columns",
    "headers",
    "where",
    "tags",
    "group",
    "startingOffsets",
    "endingOffsets",
    "failOnDataLoss",
    "failOnDamage",
    "minPartitions",
    "bytesPerSecond",
    "maxMessagesPerTrigger",
    "maxBytesPerTrigger",
)
_BATCH_ONLY: Final = {"endingOffsets": "is for read; to end a stream use trigger(availableNow=True)"}
_STREAM_ONLY: Final = dict.fromkeys(
    ("maxMessagesPerTrigger", "maxBytesPerTrigger"), "is for readStream; a batch ends at 'endingOffsets'"
)


@dataclass(frozen=True)
class ReadOptions:
    """The checked options of a read."""

    #: Either a path or servers are given.
    path: str
    server: tuple[str, ...]
    wanted: WantedRows
    columns: tuple[str, ...]
    #: Column → type of the headers that are columns of their own.
    headers: dict[str, pa.DataType]
    group: str
    start: Bound
    end: Bound
    fail_on_loss: bool
    fail_on_damage: bool
    #: None: the default for batches or streams.
    partitions_min: int | None
    bytes_per_second: int | None
    messages_per_trigger: int | None
    bytes_per_trigger: int | None
    #: The names of the options that were given.
    given: frozenset[str]

    @classmethod
    def parse(cls, given: Mapping[str, str], clock: Clock | None = None) -> ReadOptions:
        """Parse Spark's options, whose names are case-insensitive; raises ``InvalidArgument`` for a wrong option."""
        now = (clock or SystemClock()).now()
        known = {name.lower(): name for name in _OPTIONS}
        for name in given:
            if name.lower() not in known:
                raise InvalidArgument(f"unknown option {name!r}; the options are {', '.join(_OPTIONS)}")
        options = {known[name.lower()]: value for name, value in given.items()}
        path = _path(options.get("path", "").strip())
        server = tuple(part.strip() for part in options.get("server", "").split(",") if part.strip())
        if path and server:
            raise InvalidArgument(
                f"options 'path' ({path}) and 'server' ({', '.join(server)}) exclude each other; give one of them"
            )
        if not path and not server:
            raise InvalidArgument(
                "option 'path' is missing: the data directory, as in .option(\"path\", \"data\"); or 'server', "
                'as in .option("server", "plait://127.0.0.1:7450")'
            )
        place, misplaced = ("server", "group") if server else ("path", "bytesPerSecond")
        if misplaced in options:
            raise InvalidArgument(f"option {misplaced!r} does not apply to {place!r}; remove it")
        subjects = options.get("subject", "").strip()
        if not subjects:
            raise InvalidArgument("option 'subject' is missing; give a name, names between commas, or a prefix and *")
        headers = parse_headers(options["headers"]) if "headers" in options else {}
        wanted = WantedRows.of_subjects(name.strip() for name in subjects.split(","))
        return cls(
            path=path,
            server=server,
            wanted=replace(wanted, filter=_filter(options.get("where"), options.get("tags"))),
            columns=_columns(options.get("columns"), headers),
            headers=headers,
            group=names.check("group", options.get("group", DEFAULT_GROUP)),
            start=parse_bound("startingOffsets", options.get("startingOffsets", EARLIEST), now),
            end=parse_bound("endingOffsets", options.get("endingOffsets", LATEST), now),
            fail_on_loss=_flag("failOnDataLoss", options.get("failOnDataLoss", "true")),
            fail_on_damage=_flag("failOnDamage", options.get("failOnDamage", "true")),
            partitions_min=_number(options, "minPartitions"),
            bytes_per_second=_number(options, "bytesPerSecond"),
            messages_per_trigger=_number(options, "maxMessagesPerTrigger"),
            bytes_per_trigger=_number(options, "maxBytesPerTrigger"),
            given=frozenset(options),
        )

    def check_use(self, *, stream: bool) -> ReadOptions:
        """Raise ``InvalidArgument`` if an option is for streams only, or for batches only."""
        for name, reason in (_BATCH_ONLY if stream else _STREAM_ONLY).items():
            if name in self.given:
                raise InvalidArgument(f"option {name!r} {reason}")
        return self

    @property
    def whole(self) -> bool:
        """Whether all messages are read, from the earliest to the latest."""
        return self.start.kind == EARLIEST and self.end.kind == LATEST

    def tasks_min(self) -> int:
        """The minimum number of tasks: ``minPartitions``, else the number of cores of this machine."""
        return self.partitions_min or os.cpu_count() or 1


def _path(given: str) -> str:
    """A ``file:///data`` or ``file:/data`` URI, as Hadoop writes it, as a local path; other text unchanged."""
    if not given.startswith("file:/"):
        return given
    host, _, rest = given.removeprefix("file://" if given.startswith("file://") else "file:").partition("/")
    if host not in ("", "localhost"):
        raise InvalidArgument(f"path {given!r} names a host; a local path is file:///data, or /data")
    return f"/{unquote(rest)}"


def _filter(where: str | None, tags: str | None) -> FilterTerms | None:
    """The filter of the options, checked."""
    terms = filter_terms(where, None if tags is None else [tag.strip() for tag in tags.split(",")])
    return None if terms is None else compile_filter(terms).terms


def _columns(given: str | None, headers: Mapping[str, object]) -> tuple[str, ...]:
    """The named columns; headers that are not named come last."""
    columns = tuple(COLUMNS) if given is None else tuple(part.strip() for part in given.split(","))
    for column in columns:
        if column not in COLUMNS and column not in headers:
            known = ", ".join((*COLUMNS, *headers))
            raise InvalidArgument(f"unknown column {column!r}; the columns are {known}, and those of option 'headers'")
    if len(set(columns)) < len(columns):
        raise InvalidArgument(f"columns {given!r} name a column twice; remove one")
    return columns + tuple(column for column in headers if column not in columns)


def _number(options: Mapping[str, str], name: str) -> int | None:
    given = options.get(name)
    if given is None:
        return None
    if not given.isdecimal() or not int(given):
        raise InvalidArgument(f"{name} {given!r} is not a whole number of 1 or more")
    return int(given)


def _flag(name: str, given: str) -> bool:
    if given.lower() not in ("true", "false"):
        raise InvalidArgument(f"{name} {given!r} is neither true nor false; use one of them")
    return given.lower() == "true"
