"""Kills the broker, the driver and the workers of a streaming query, and checks that each message is written once.

The test sends more messages whenever a batch is done, so that the query always has work, and kills processes during a
batch. At the end a query in the test's own Spark session continues from the same checkpoint until nothing is left. Then
the test compares the files with the receipts.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import psutil

import plait.sync
from tests.support.process import ServerProcess
from tests.support.program import ROOT
from tests.support.scratch import scratch_environ

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The longest wait for a batch on a machine under load, including the start of Java.
PATIENCE_SECONDS = 90.0
#: The longest time from the end of a batch to a kill. Spark plans, reads or writes the next batch at that time.
MOMENT_SECONDS = 0.4
BLOCK = 100


class StreamUnderFire:
    """One query's files and checkpoint, the broker it reads from, and the processes that run it."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self._rng = rng
        self._environ = scratch_environ(directory) | {"PYTHONPATH": str(ROOT)}
        self._out, self._checkpoint = directory / "out", directory / "checkpoint"
        self._log = directory / "driver.log"
        self.server = ServerProcess(directory / "data")
        self._driver: subprocess.Popen[bytes] | None = None
        self._client: plait.sync.Client | None = None
        self._line = b""
        #: Partition and sequence → body, of every acknowledged message.
        self.sent: dict[tuple[str, int], bytes] = {}

    def __enter__(self) -> Self:
        self.server.start()
        self._client = plait.sync.connect(self.server.address).open()
        self._client.admin.create_subject("orders", partitions=2)
        self.send(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_driver()
        try:
            if self._client is not None:
                self._client.close()
        finally:
            self.server.kill()

    def send(self, blocks: int) -> None:
        """Send this many frames of messages with keys."""
        assert self._client is not None
        for _ in range(blocks):
            first = len(self.sent)
            bodies = [b"%d" % number for number in range(first, first + BLOCK)]
            receipts = self._client.send_many("orders", bodies, keys=[f"k{n % 17}" for n in range(BLOCK)])
            for receipt, body in zip(receipts, bodies, strict=True):
                assert receipt.sequence is not None
                self.sent[str(receipt.partition), receipt.sequence] = body

    # --- the driver -----------------------------------------------------------------------------

    def batches(self, count: int) -> None:
        """Wait until ``count`` more batches are done; restarts a driver that has ended, as an operator would."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while count:
            if self._driver is None:
                self._start_driver()
            if self._wait_line(deadline - time.monotonic()):
                count -= 1
                self.send(4)
            elif time.monotonic() >= deadline:
                raise AssertionError(f"the query makes no progress\n{self._log.read_text()[-6000:]}")

    def _start_driver(self) -> None:
        module = ["-m", "tests.support.spark_driver", self.server.address, str(self._out), str(self._checkpoint)]
        with self._log.open("ab") as log:
            # Its own process group, so that a kill includes Java.
            self._driver = subprocess.Popen(
                [sys.executable, *module],
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=self._environ,
                start_new_session=True,
            )

    def _wait_line(self, seconds: float) -> bool:
        """Wait for a batch; False when the time is up or the driver has ended."""
        assert self._driver is not None
        assert self._driver.stdout is not None
        until = time.monotonic() + seconds
        while b"\n" not in self._line:
            readable, _, _ = select.select([self._driver.stdout], [], [], max(until - time.monotonic(), 0.0))
            if not readable:
                return False
            piece = os.read(self._driver.stdout.fileno(), 4096)
            if not piece:
                self.kill_driver()
                return False
            self._line += piece
        _, _, self._line = self._line.partition(b"\n")
        return True

    # --- kills ----------------------------------------------------------------------------------

    def kill(self, what: str) -> None:
        """Kill the broker, the driver or a worker at a random moment of a batch."""
        if self._driver is not None:
            self._wait_line(self._rng.uniform(0.0, MOMENT_SECONDS))
        if what == "broker":
            self.server.kill()
            self.server.start()
        elif what == "driver":
            self.kill_driver()
        else:
            self._kill_worker()

    def kill_driver(self) -> None:
        """Kill Python and Java with SIGKILL."""
        driver, self._driver, self._line = self._driver, None, b""
        if driver is not None:
            children = psutil.Process(driver.pid).children(recursive=True) if driver.poll() is None else []
            with _ignore_ended():
                os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
            psutil.wait_procs(children, timeout=PATIENCE_SECONDS)
            assert driver.stdout is not None
            driver.stdout.close()

    def _kill_worker(self) -> None:
        """Kill one of Spark's Python workers."""
        assert self._driver is not None
        with _ignore_ended():
            below = psutil.Process(self._driver.pid).children(recursive=True)
            workers = [p for p in below if "plait.spark" in " ".join(p.cmdline()) or "pyspark" in " ".join(p.cmdline())]
            leaves = [p for p in workers if p.name().startswith("python") and not p.children()]
            assert leaves, [process.cmdline() for process in below]
            self._rng.choice(sorted(leaves, key=lambda process: process.pid)).kill()

    # --- the check ------------------------------------------------------------------------------

    def check(self, spark: SparkSession) -> None:
        """Read the rest and compare: every message once, and nothing else."""
        self.kill_driver()
        source = spark.readStream.format("plait").options(
            server=self.server.address, subject="orders", columns="partition,sequence,body"
        )
        writer = source.load().writeStream.option("checkpointLocation", str(self._checkpoint))
        query = writer.trigger(availableNow=True).start(str(self._out), "parquet")
        assert query.awaitTermination(int(PATIENCE_SECONDS)), query.status
        rows = spark.read.parquet(str(self._out)).collect()
        counts = Counter((row.partition, row.sequence) for row in rows)
        assert [place for place, count in counts.items() if count > 1] == []
        assert {(row.partition, row.sequence): bytes(row.body) for row in rows} == self.sent


class _ignore_ended:
    """Ignore that the process to kill has ended by itself."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return kind is not None and issubclass(kind, psutil.NoSuchProcess | ProcessLookupError)
