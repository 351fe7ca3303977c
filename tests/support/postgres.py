"""A private PostgreSQL instance for tests, in a temporary directory, reached by a socket in it.

Other servers on the machine are not touched. PostgreSQL refuses root: when the tests run as root, it runs as another
user.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.require import require, require_package

#: Where Debian installs the programs, which are not on the path.
DEBIAN = Path("/usr/lib/postgresql")
#: Users that run it when the tests run as root.
USERS = ("postgres", "nobody")
#: The data does not outlive the tests, so nothing has to reach the disk.
SETTINGS = {
    "listen_addresses": "''",
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "max_connections": "50",
    "autovacuum": "off",
}


class Postgres:
    """One instance; ``url`` makes a database for each test."""

    def __init__(self) -> None:
        require_package("psycopg", extra="postgres")
        self._programs = find_programs()
        require(self._programs, "PostgreSQL is not installed (tools/debian-install postgresql)")
        self._as: dict[str, Any] = other_user(USERS)
        self._numbers = count()
        # Short, because the path of a socket is limited.
        self._directory = Path(tempfile.mkdtemp(prefix="plait-pg-"))
        if self._as:
            os.chown(self._directory, self._as["user"], self._as["group"])
        self._data = self._directory / "data"
        self._run("initdb", "-D", self._data, "-A", "trust", "-U", "plait", "-E", "UTF8", "--no-locale", "--no-sync")
        with (self._data / "postgresql.conf").open("a") as settings:
            settings.writelines(f"{name} = {value}\n" for name, value in SETTINGS.items())
            settings.write(f"unix_socket_directories = '{self._directory}'\n")
        self.start()

    def start(self) -> None:
        self._run("pg_ctl", "start", "-w", "-D", self._data, "-l", self._directory / "log")

    def stop(self) -> None:
        """Stop the server; connections are cut."""
        self._run("pg_ctl", "stop", "-w", "-m", "immediate", "-D", self._data)

    def remove(self) -> None:
        """Stop the server, if it runs, and delete its data."""
        if (self._data / "postmaster.pid").exists():
            self.stop()
        shutil.rmtree(self._directory)

    def url(self, name: str) -> str:
        return f"postgresql://plait@/{name}?host={self._directory}"

    def create(self, template: str = "template1") -> str:
        """Create a database; returns its address."""
        name = f"test{next(self._numbers)}"
        self._psql(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return self.url(name)

    def drop(self, url: str) -> None:
        self._psql(f'DROP DATABASE "{name_of(url)}" WITH (FORCE)')

    def _psql(self, statement: str) -> None:
        psycopg = require_package("psycopg", extra="postgres")
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(statement)

    def _run(self, program: str, *arguments: str | Path) -> None:
        assert self._programs is not None
        command = [self._programs / program, *arguments]
        environment = {**os.environ, "LC_ALL": "C"}
        result = subprocess.run(
            command, capture_output=True, text=True, cwd=self._directory, env=environment, timeout=60, **self._as
        )
        assert result.returncode == 0, f"{program}: {result.stderr}"


def name_of(url: str) -> str:
    """The name of the database in an address."""
    return urlsplit(url).path.removeprefix("/")


def find_programs() -> Path | None:
    """The directory with PostgreSQL's programs, the newest if there are several."""
    found = [path for path in DEBIAN.glob("*/bin") if (path / "initdb").exists()]
    if found:
        return max(found, key=lambda path: int(path.parent.name) if path.parent.name.isdigit() else 0)
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


def other_user(names: Sequence[str]) -> dict[str, Any]:
    """Arguments of ``subprocess`` that run a program as one of these users where it would run as root."""
    if os.geteuid() != 0:
        return {}
    for name in names:
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    raise AssertionError(f"root needs another user to run a database server: one of {', '.join(names)}")
