"""A private MariaDB instance for tests, in a temporary directory, reached by a socket in it.

Other servers on the machine are not touched. MariaDB refuses root: when the tests run as root, it runs as another user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

from tests.support.postgres import other_user
from tests.support.require import require_package, require_program

#: The user of the database, not of the machine.
ADMINISTRATOR = "root"
#: Users that run it when the tests run as root.
USERS = ("mysql", "nobody")
#: The data does not outlive the tests, so nothing has to reach the disk.
SETTINGS = (
    "--skip-networking",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-flush-method=nosync",
    "--innodb-buffer-pool-size=16M",
    "--innodb-log-file-size=8M",
    "--performance-schema=OFF",
)
START_SECONDS = 60.0
START_PAUSE_SECONDS = 0.05


class MariaDB:
    """One instance; ``create`` makes a database for each test."""

    def __init__(self) -> None:
        require_package("pymysql")
        install = require_program("mariadb-install-db", package="mariadb-server")
        self._program = require_program("mariadbd", package="mariadb-server")
        self._as: dict[str, Any] = other_user(USERS)
        self._numbers = count()
        # Short, because the path of a socket is limited.
        self._directory = Path(tempfile.mkdtemp(prefix="plait-my-"))
        if self._as:
            os.chown(self._directory, self._as["user"], self._as["group"])
        self._socket = self._directory / "socket"
        # The directory of temporary files of the tests is closed to other users.
        self._common = ["--no-defaults", f"--datadir={self._directory / 'data'}", f"--tmpdir={self._directory}"]
        installed = subprocess.run(
            [install, *self._common, "--auth-root-authentication-method=normal", "--skip-test-db"],
            capture_output=True,
            text=True,
            cwd=self._directory,
            timeout=START_SECONDS,
            **self._as,
        )
        assert installed.returncode == 0, installed.stderr
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        arguments = [*self._common, *SETTINGS, f"--socket={self._socket}"]
        with (self._directory / "log").open("ab") as log:
            process = subprocess.Popen(
                [self._program, *arguments], stdout=log, stderr=log, cwd=self._directory, **self._as
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._ready():
            assert process.poll() is None, (self._directory / "log").read_text()
            assert time.monotonic() < deadline, "MariaDB does not answer"
            try:
                process.wait(START_PAUSE_SECONDS)
            except subprocess.TimeoutExpired:
                pass
        return process

    def _ready(self) -> bool:
        return b"ready for connections" in (self._directory / "log").read_bytes()

    def remove(self) -> None:
        """Stop the server and delete its data."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._directory)

    def create(self) -> str:
        """Create a database; returns its address."""
        name = f"test{next(self._numbers)}"
        self._execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
        return f"mariadb+pymysql://{ADMINISTRATOR}@/{name}?unix_socket={self._socket}"

    def _execute(self, statement: str) -> None:
        pymysql = require_package("pymysql")
        connection = pymysql.connect(unix_socket=str(self._socket), user=ADMINISTRATOR)
        try:
            connection.cursor().execute(statement)
        finally:
            connection.close()
