"""Producers and brokers killed by SIGKILL at every step of a transaction, beside a local database.

In the end the messages of exactly those transactions are visible whose row is in the database, each once.
"""

from __future__ import annotations

import contextlib
import socket
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import plait
import plait.sync
from tests.client.support import EAGER, wait_until
from tests.support.transaction_processes import STEPS, SUBJECTS

COMMAND = [sys.executable, "-m", "tests.support.transaction_processes"]


class Node:
    """A broker process that can be killed and started again at the same address."""

    def __init__(self, data: Path) -> None:
        self._data = data
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        self.address = f"plait://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [*COMMAND, "broker", str(self._data), str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline().startswith("ready ")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def producer(role: str, node: Node, database: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [*COMMAND, role, node.address, str(database), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_kills_at_every_step_publish_exactly_what_the_database_has(tmp_path: Path):
    database = tmp_path / "local.db"
    local = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
    local.execute("PRAGMA journal_mode = WAL")
    local.execute("CREATE TABLE deals (id TEXT, number INTEGER)")

    def check(transaction: plait.TransactionInfo) -> str:
        found = sqlite3.connect(database).execute("SELECT * FROM deals WHERE id = ?", (transaction.id,)).fetchone()
        return "commit" if found else "rollback"

    node = Node(tmp_path / "data")
    node.start()
    try:
        with contextlib.ExitStack() as stack:
            dying = [
                stack.enter_context(producer("dies", node, database, str(number), step))
                for number, step in enumerate(STEPS)
            ]
            assert [process.wait(60) for process in dying] == [-9] * len(STEPS)
        with producer("waits", node, database, "100") as living:
            assert living.stdout is not None
            assert living.stdout.readline() == "waiting\n"
            node.kill()
            node.start()
            output, _ = living.communicate("\n", timeout=60)
            assert output == "done\n"
        with plait.sync.connect(node.address, limits=EAGER) as client:
            client.transaction_checks("shop", check)  # type: ignore[arg-type]
            wait_until(lambda: not client.admin.transactions())
            node.kill()
            node.start()
            wanted = Counter(str(number) for (number,) in local.execute("SELECT number FROM deals"))
            assert len(wanted) == len(STEPS[3:]) + len(STEPS)
            for subject in SUBJECTS:
                with client.reader(subject, start="earliest") as reader:
                    found: Counter[str] = Counter()
                    wait_until(lambda reader=reader, found=found: _read(reader, found) >= wanted.total())
                    _read(reader, found)
                assert found == wanted
    finally:
        node.kill()


def _read(reader: plait.sync.Reader, found: Counter[str]) -> int:
    """Add the bodies of new messages; returns how many there are in all."""
    found.update(message.body.decode() for message in reader.fetch(100, wait=0.2))
    return found.total()
