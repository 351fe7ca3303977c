"""Checks the meta database of a node: that it can be read, and that its routes agree with the catalog of the logs."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from plait.broker.config import BrokerConfig
from plait.doctor.findings import CheckReport, Severity
from plait.meta.database.connection import DATABASE
from plait.meta.database.migrate import VERSION_TABLE, VERSIONS
from plait.meta.database.schema import PREFIX
from plait.meta.route_rebuild import missing
from plait.model.names import counted
from plait.model.route import PartitionId, Route
from plait.storage.catalog import PartitionRow
from plait.storage.marks import IDENTITY
from plait.wire.admin.cluster import RegisteredPartition

PART = "meta database"
#: The database and the files that SQLite writes beside it.
FILES = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-journal")
SHARED = f"{DATABASE}-shm"
#: Subjects that one finding names. More are only counted.
NAMED_MAX = 3
_RESTORE = (
    "restore it from a copy while the server is stopped, or move it away: the next start rebuilds routes from the logs"
)
#: The broker group of a node's own broker.
_GROUP = BrokerConfig().group


class MetaCheck:
    """One check of the database. ``catalog``: the partitions that the logs define, by number."""

    def __init__(self, path: Path, catalog: Mapping[int, PartitionRow], report: CheckReport) -> None:
        self._path = path
        self._catalog = {row.name: row for row in catalog.values() if not row.kind and not row.deleted}
        self._report = report

    def run(self) -> None:
        file = self._path / DATABASE
        if not file.exists():
            if not (self._path / IDENTITY).exists():
                self._missing()
            return
        try:
            with contextlib.ExitStack() as stack:
                if not self._report.in_use:
                    # SQLite writes files beside a database that it reads: so a copy is read.
                    copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plait-doctor-")))
                    for name in FILES:
                        with contextlib.suppress(FileNotFoundError):
                            shutil.copyfile(self._path / name, copy / name)
                    file = copy / DATABASE
                uri = f"{file.absolute().as_uri()}?mode={'ro' if self._report.in_use else 'rw'}"
                connection = sqlite3.connect(uri, uri=True, timeout=5.0)
                self._read(stack.enter_context(contextlib.closing(connection)))
        except sqlite3.OperationalError as error:
            busy = "locked" in str(error) or "unable to open" in str(error)
            if busy and self._report.in_use:
                self._add("note", f"cannot be read while the server uses it: {error}", "none", "stop the server first")
            else:
                self._broken(str(error))
        except sqlite3.Error as error:
            self._broken(str(error))

    def _read(self, connection: sqlite3.Connection) -> None:
        problems = [row[0] for row in connection.execute("PRAGMA integrity_check(10)")]
        if problems != ["ok"]:
            self._broken(str(problems[0]))
            return
        version = connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone()
        if version is None or version[0] not in VERSIONS:
            self._broken(f"its schema is {version and version[0]!r}, this version of Plait knows up to {VERSIONS[-1]}")
            return
        subjects = {name for (name,) in connection.execute(f"SELECT name FROM {PREFIX}subjects WHERE NOT deleted")}
        routes: dict[str, Route] = {}
        for subject, body in connection.execute(f"SELECT subject, body FROM {PREFIX}routes"):
            try:
                routes[subject] = msgspec.msgpack.decode(body, type=Route)
            except (msgspec.MsgspecError, TypeError) as error:
                self._broken(f"the route of subject {subject!r} does not decode: {error}")
                return
        known = connection.execute(
            f"SELECT name, subject, told, state FROM {PREFIX}partitions WHERE broker_group = ?", [_GROUP]
        )
        self._compare(subjects, routes, known.fetchall())

    def _compare(self, subjects: set[str], routes: dict[str, Route], known: list[tuple[str, str, int, str]]) -> None:
        if lost := sorted(subjects - routes.keys()):
            self._broken(f"{_named(lost)} {'has' if len(lost) == 1 else 'have'} no route")
        if self._report.in_use:
            # The logs and the database change while they are read.
            return
        listed = {name: subject for name, subject, told, state in known if told and state == "kept"}
        gone = sorted(name for name, subject in listed.items() if subject in subjects and name not in self._catalog)
        if gone:
            self._add(
                "damaged",
                f"its routes lead to {_named(gone)}, which the message log does not define",
                "their messages are lost, or another broker group has them",
                "restore the logs and the database from copies of the same time",
            )
        every = {name for name, _, _, _ in known}
        unknown = sorted(name for name, row in self._catalog.items() if row.route and name not in every)
        if unknown:
            self._add(
                "damaged",
                f"it lacks {_named(unknown)}, which the message log defines: it is older than the logs",
                "no route leads there: their messages are not read",
                _RESTORE,
            )

    def _missing(self) -> None:
        routed = [row for row in self._catalog.values() if row.route]
        if not routed:
            return
        found: dict[str, dict[PartitionId, RegisteredPartition]] = {}
        for row in routed:
            facts = RegisteredPartition(row.name, row.subject, route=row.route, lps=row.lps)
            found.setdefault(row.subject, {})[PartitionId(row.name, _GROUP)] = facts
        partly = sorted(subject for subject, partitions in found.items() if missing(partitions))
        harm = f"the routes of {counted(len(found), 'subject')} are lost; the next start rebuilds them from the logs"
        if partly:
            harm += f", those of {_named(partly)} only after the brokers with their other partitions start too"
        self._add(
            "damaged", "is missing, although the logs have routes", harm, "restore it from a copy, or start the server"
        )

    def _broken(self, what: str) -> None:
        self._add("damaged", what, "the server does not start, or does not know where messages are", _RESTORE)

    def _add(self, severity: Severity, what: str, harm: str, advice: str) -> None:
        self._report.add(severity, PART, DATABASE, what, harm, advice)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(map(repr, names[:NAMED_MAX])) + more
