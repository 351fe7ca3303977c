"""Runs a streaming query from one subject to another, and kills driver, workers and broker at random moments.

At the end every message must be stored once, and each key in the order of sending.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import psutil

import plait.sync
from tests.support.process import ServerProcess
from tests.support.scratch import scratch_environ

SOURCE, TARGET = "in", "out"
#: The test fails if a driver takes longer than this for its part of the run.
LIFE_SECONDS = 240.0
KEYS = 10


class SinkChaos:
    """One run with this many kills, from a seed."""

    def __init__(self, directory: Path, seed: int, *, kills: int, batches: int = 12, rows: int = 800) -> None:
        self._directory = directory
        self._draw = random.Random(seed)
        self._victims = [("driver", "broker", "worker")[number % 3] for number in range(kills)]
        self._draw.shuffle(self._victims)
        self._rows = rows
        self._total = batches * rows
        self.killed: Counter[str] = Counter()

    def run(self) -> None:
        """Run the query with its kills. Raises if a message is missing, stored twice, or out of order."""
        with ServerProcess(self._directory / "data", flush="sync") as server:
            server.start()
            with plait.sync.connect(server.address) as client:
                for subject in (SOURCE, TARGET):
                    client.admin.create_subject(subject, partitions=2)
                keys = [f"k{n % KEYS}" for n in range(self._total)]
                client.send_many(SOURCE, [b"%d" % n for n in range(self._total)], keys=keys)
                # The kills come at different points of the run and of a batch.
                # A batch remains after the last kill: a driver that is done cannot be killed.
                marks = sorted(self._draw.randrange(self._total - self._rows) for _ in self._victims)
                self._start_driver(server)
                try:
                    for mark, victim in zip(marks, self._victims, strict=True):
                        self._strike(server, client, mark, victim)
                    self._finish(server)
                finally:
                    self._kill_driver()
                self._check(client)

    def _start_driver(self, server: ServerProcess) -> None:
        command = [sys.executable, "-P", "-m", "tests.support.sink_driver", server.address, SOURCE, TARGET]
        command += [str(self._directory / "checkpoint"), str(self._rows)]
        with (self._directory / "driver.log").open("ab") as log:
            # Its own process group, so that a kill includes Java; the Python workers end with Java.
            self._driver = subprocess.Popen(
                command, stdout=log, stderr=log, env=scratch_environ(self._directory), start_new_session=True
            )

    def _kill_driver(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._driver.pid, signal.SIGKILL)
        self._driver.wait()

    def _restart_driver(self, server: ServerProcess) -> None:
        self._kill_driver()
        self._start_driver(server)

    def _kill_worker(self) -> bool:
        """Kill one of Spark's Python workers when there is one. Returns False if the driver ends before."""
        deadline = time.monotonic() + LIFE_SECONDS
        while self._driver.poll() is None:
            assert time.monotonic() < deadline, self._log()
            with contextlib.suppress(psutil.NoSuchProcess):
                below = psutil.Process(self._driver.pid).children(recursive=True)
                workers = [process for process in below if process.name().startswith("python")]
                leaves = sorted(process.pid for process in workers if not process.children())
                if leaves:
                    psutil.Process(self._draw.choice(leaves)).kill()
                    return True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._driver.wait(0.05)
        return False

    def _strike(self, server: ServerProcess, client: plait.sync.Client, mark: int, victim: str) -> None:
        """Kill the driver, a worker or the broker when about ``mark`` messages are visible."""
        while not self._wait(client, mark) or (victim == "worker" and not self._kill_worker()):
            # The query failed because the broker was down.
            assert self._driver.poll() != 0, f"the driver was done before the {victim} was killed at message {mark}"
            self._restart_driver(server)
        self.killed[victim] += 1
        if victim == "driver":
            self._restart_driver(server)
        elif victim == "broker":
            server.kill()
            server.start()

    def _wait(self, client: plait.sync.Client, mark: int) -> bool:
        """Wait until ``mark`` messages are visible. Returns False if the driver ends before."""
        deadline = time.monotonic() + LIFE_SECONDS
        seen = 0
        with client.reader(TARGET, start="earliest") as reader:
            while self._driver.poll() is None:
                assert time.monotonic() < deadline, self._log()
                if seen >= mark:
                    # A batch was just published; planning, staging and writing of the next one follow.
                    reader.fetch(1, wait=self._draw.uniform(0.0, 0.6))
                    return self._driver.poll() is None
                with contextlib.suppress(plait.PlaitError):
                    seen += len(reader.fetch(10_000, wait=0.5))
        return False

    def _finish(self, server: ServerProcess) -> None:
        """Restart the driver until it reaches the end."""
        deadline = time.monotonic() + LIFE_SECONDS
        while (code := self._driver.poll()) != 0:
            assert time.monotonic() < deadline, self._log()
            if code is not None:
                self._restart_driver(server)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._driver.wait(0.5)

    def _log(self) -> str:
        return (self._directory / "driver.log").read_text()[-6000:]

    def _check(self, client: plait.sync.Client) -> None:
        found: dict[str | None, list[int]] = defaultdict(list)
        with client.reader(TARGET, start="earliest") as reader:
            while batch := reader.fetch(10_000, wait=0.0):
                for message in batch:
                    found[message.key].append(int(message.body))
        counts = Counter(number for numbers in found.values() for number in numbers)
        wanted = set(range(self._total))
        assert set(counts) == wanted, f"{len(wanted - set(counts))} messages are missing"
        assert max(counts.values()) == 1, f"{counts.most_common(3)} are stored more than once"
        for key, numbers in found.items():
            assert numbers == sorted(numbers), f"the messages of {key} are out of order"
