"""Several archivers of different speed on one store, one step at a time, from a seed.

The archivers are the real ones, with small texts instead of Parquet files and a counter instead of a log. Each runs in
its own thread, but only one at a time: an archiver stops before each operation of the store, and the seed decides which
one continues, and which one pauses for hundreds of operations of the others. The store can put, list, read and remove.
A listing is not atomic, an archiver may be killed at any step, and a failed put may take effect now, later or never.
The clocks of the archivers and of the store differ by days.
"""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyarrow import fs

from plait import chance
from plait.clock import ManualClock
from plait.errors import ArchiveConflict, ArchiveError
from plait.spark.archiving import archiver as archiving
from plait.spark.archiving.archive_round import Round
from plait.spark.archiving.archive_tasks import CompactTask, TaskFacts, compaction_tasks
from plait.spark.archiving.archiver import Archiver
from plait.spark.archiving.file_writer import FileWriter
from plait.spark.archiving.manifest import Archive, ArchivedFile, ArchiveManifest
from plait.storage.marks import ArchiveMark
from tests.spark.archives import run_here

#: Operations of the store during which archivers are started; this gives some ten to forty commits.
TURNS = 2500


class Broken(AssertionError):
    """A promise of the archivers does not hold."""


class Killed(BaseException):
    """The process ends here."""


class Turns:
    """Threads of which one runs at a time; at ``step`` another one may continue."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.count = 0
        self.calm = False
        self._main = threading.Semaphore(0)
        self._gates: dict[str, threading.Semaphore] = {}
        self._asleep: dict[str, int] = {}
        #: Each archiver's probability to pause at a step, shortly or for long.
        self._paces: dict[str, float] = {}
        self._killed: set[str] = set()
        #: (turn, effect): puts that take effect late.
        self.later: list[tuple[int, Callable[[], None]]] = []
        self.failure: BaseException | None = None

    @property
    def me(self) -> str:
        return threading.current_thread().name

    def step(self) -> None:
        """Any other archiver may do any number of steps here."""
        if (gate := self._gates.get(self.me)) is None or self.calm:
            return
        draw = self.rng.random()
        pace = self._paces[self.me]
        sleep = 0 if draw > pace else self.rng.randrange(10) if draw > pace / 8 else self.rng.randrange(100, 1500)
        self._asleep[self.me] = self.count + sleep
        self._main.release()
        gate.acquire()
        if self.me in self._killed:
            self._killed.discard(self.me)
            raise Killed

    def run(self, name: str, work: Callable[[], None]) -> None:
        """Start an archiver; it waits for its turn."""
        gate = self._gates[name] = threading.Semaphore(0)
        self._asleep[name] = 0
        self._paces[name] = self.rng.choice((0.01, 0.1, 0.3))

        def whole() -> None:
            gate.acquire()
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - it is raised again in ``go``
                self.failure = self.failure or error
            finally:
                del self._gates[name]
                self._main.release()

        threading.Thread(target=whole, name=name, daemon=True).start()

    def go(self) -> None:
        """Run until all archivers have ended."""
        while self._gates:
            self.count += 1
            for due in [each for each in self.later if each[0] <= self.count]:
                self.later.remove(due)
                due[1]()
            awake = [name for name in sorted(self._gates) if self._asleep[name] <= self.count]
            if not awake:
                self.count = min(self._asleep[name] for name in self._gates)
                continue
            name = self.rng.choice(awake)
            if self.rng.random() < 0.001 and self.count < TURNS:
                self._killed.add(name)
            self._gates[name].release()
            self._main.acquire()
        if self.failure is not None:
            raise self.failure


class Store(fs.FileSystemHandler):  # type: ignore[misc]
    """Files in memory, with only the operations that every object store has."""

    def __init__(self, turns: Turns, judge: Judge) -> None:
        self._turns = turns
        self._judge = judge
        self.files: dict[str, tuple[bytes, int]] = {}
        #: The days by which the store's clock is ahead.
        self.days = turns.rng.choice((-400, -1, 0, 1, 40))

    def get_type_name(self) -> str:
        return "simulated"

    def normalize_path(self, path: str) -> str:
        return path

    def _info(self, path: str) -> fs.FileInfo:
        if path not in self.files:
            return fs.FileInfo(path, fs.FileType.NotFound)
        data, turn = self.files[path]
        time = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=self.days, seconds=turn)
        return fs.FileInfo(path, fs.FileType.File, size=len(data), mtime=time)

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        self._turns.step()
        return [self._info(path) for path in paths]

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        """List page by page: files that are put or removed meanwhile may be in the listing or not."""
        pages, size = [], self._turns.rng.choice((5, 1000, 1000))
        last = ""
        while True:
            self._turns.step()
            there = sorted(path for path in self.files if path.startswith(f"{selector.base_dir}/") and path > last)
            pages += [self._info(path) for path in there[:size]]
            if len(there) <= size:
                return pages
            last = there[size - 1]

    def create_dir(self, path: str, recursive: bool) -> None:
        """Nothing to do: object stores have no directories."""

    def open_input_stream(self, path: str) -> pa.NativeFile:
        self._turns.step()
        if path not in self.files:
            raise FileNotFoundError(path)
        return pa.PythonFile(io.BytesIO(self.files[path][0]), "r")

    open_input_file = open_input_stream

    def open_output_stream(self, path: str, metadata: object) -> pa.NativeFile:
        return pa.PythonFile(_Upload(self, path), "w")

    def put(self, path: str, data: bytes) -> None:
        turns, rng = self._turns, self._turns.rng
        turns.step()

        def effect() -> None:
            self._judge.put(path, data)
            self.files[path] = (data, turns.count)

        draw = 1.0 if turns.calm or turns.count > TURNS else rng.random()
        if draw < 0.005:
            if draw < 0.002:
                effect()
            elif draw < 0.004:
                turns.later.append((turns.count + rng.randrange(300), effect))
            raise OSError(110, "the store does not answer")
        effect()

    def delete_file(self, path: str) -> None:
        self._turns.step()
        if path not in self.files:
            raise FileNotFoundError(path)
        self._judge.remove(path)
        del self.files[path]

    def _refuse(self, *_: object) -> Any:
        raise AssertionError("an archiver must not use this operation")

    delete_dir = delete_dir_contents = delete_root_dir_contents = move = copy_file = open_append_stream = _refuse


class _Upload(io.BytesIO):
    """A file becomes visible when it is closed."""

    def __init__(self, store: Store, path: str) -> None:
        super().__init__()
        self._store, self._path = store, path

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._store.put(self._path, data)


class Judge:
    """Checks every change of the store."""

    def __init__(self) -> None:
        self.store: Store
        #: The first failure; kept, because an archiver may swallow the error.
        self.broken: Broken | None = None
        #: Number → (writer, manifest) of each commit.
        self.history: dict[int, tuple[str, ArchiveManifest]] = {}
        self.newest = ArchiveManifest()
        self.reported = 0

    def fail(self, text: str) -> Broken:
        self.broken = self.broken or Broken(text)
        return self.broken

    def put(self, path: str, data: bytes) -> None:
        name = path.rpartition("/")[2]
        if not name.startswith("commit-"):
            return
        number, writer = int(name.split("-")[1]), name.split("-")[2]
        raw = self.store.files[f"archive/_plait/manifest-{number:020d}-{writer}.json"][0] if self._new(number) else b""
        if not raw:
            if self.history[number][0] != writer:
                raise self.fail(f"manifest {number} of {self.history[number][0]} was replaced by one of {writer}")
            return
        manifest = msgspec.json.decode(
            bytes(msgspec.json.decode(raw, type=dict[str, msgspec.Raw])["manifest"]), type=ArchiveManifest
        )
        if (manifest.number, manifest.previous) != (self.newest.number + 1, self.newest.writer):
            raise self.fail(f"manifest {number} of {writer} does not follow manifest {self.newest.number}")
        self.history[number] = (writer, manifest)
        self.newest = manifest
        self.check()

    def _new(self, number: int) -> bool:
        return number not in self.history

    def check(self) -> None:
        """Each message is in one file, and the file exists."""
        end = 0
        for file in sorted(self.newest.files, key=lambda file: file.start):
            if file.start != end:
                raise self.fail(
                    f"messages from {min(end, file.start)} to {max(end, file.start)} are archived twice or not at all"
                )
            if f"archive/{file.path}" not in self.store.files:
                raise self.fail(f"{file.path} is missing, and manifest {self.newest.number} names it")
            end = file.end
        if end != self.offset:
            raise self.fail(f"the archive has messages up to {end}, and its manifest says {self.offset}")

    @property
    def offset(self) -> int:
        return max((source.message_offset for source in self.newest.sources.values()), default=0)

    def remove(self, path: str) -> None:
        if any(path == f"archive/{file.path}" for file in self.newest.files):
            raise self.fail(f"{path} is removed, and manifest {self.newest.number} names it")
        if path.endswith(f"{self.newest.number:020d}-{self.newest.writer}.json"):
            raise self.fail("the newest manifest is removed")

    def report(self, offset: int) -> None:
        """Retention may remove the log up to here."""
        if offset > self.offset:
            raise self.fail(f"{offset} is reported to retention, and the archive has {self.offset}")
        self.reported = max(self.reported, offset)


class _Text:
    """A task that archives a few messages as a text file."""

    weight = 1

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def run(self, writer: FileWriter) -> TaskFacts:
        path = f"messages/subject=orders/date=2026-01-01/{writer.name('parquet')}"
        writer.archive.write(path, b"%d-%d" % (self.start, self.end))
        file = ArchivedFile(
            path=path,
            kind="messages",
            subject="orders",
            date="2026-01-01",
            count=self.end - self.start,
            size=1,
            raw_size=1,
            crc=0,
            source=writer._source,
            start=self.start,
            end=self.end,
            partitions={"orders@g1": (self.start, self.end - 1)},
            time_min=0,
            time_max=0,
        )
        return TaskFacts(files=[file])


class _Merge(CompactTask):
    def run(self, writer: FileWriter) -> TaskFacts:
        for file in self.files:
            with writer.archive.files.open_input_stream(writer.archive.path(file.path)) as stream:
                stream.read()
        return _Text(self.files[0].start, self.files[-1].end).run(writer)


class Archivers:
    """One seed."""

    def __init__(self, seed: int, data: Path, patch: pytest.MonkeyPatch) -> None:
        self.rng = random.Random(seed)
        self.turns = Turns(self.rng)
        self.judge = Judge()
        self.store = self.judge.store = Store(self.turns, self.judge)
        self.archive = Archive(fs.PyFileSystem(self.store), "archive", "sim://archive")
        self.conflicts = self.commits = 0
        #: The number of messages in the log.
        self.log = 0
        self._data = data
        (data / "message").mkdir(parents=True, exist_ok=True)
        patch.setattr(Archive, "at", staticmethod(lambda place: self.archive))
        patch.setattr(archiving, "run_job", run_here)
        patch.setattr(archiving, "Intake", self._intake)
        patch.setattr(archiving, "write_archived", self._report)
        patch.setattr(
            archiving, "compaction_tasks", lambda *about: [_Merge(task.files) for task in compaction_tasks(*about)]
        )

    def _intake(self, data: str, group: str, source: Any, **_: object) -> Any:
        class Intake:
            @staticmethod
            def rounds(wanted: object) -> list[Round]:
                self.log += self.rng.randrange(3)
                points = sorted({source.message_offset, *self.rng.sample(range(self.log + 1), 1), self.log})
                points = [point for point in points if point >= source.message_offset]
                return [Round([_Text(start, end)], end, 0, 0) for start, end in pairwise(points)]

        return Intake

    def _report(self, disk: object, archived: ArchiveMark) -> None:
        self.turns.step()
        self.judge.report(archived.message_offset)

    def _archiver(self, days: int) -> None:
        clock = ManualClock(now=1_750_000_000_000_000 + days * 86_400_000_000)
        while self.turns.count < TURNS:
            try:
                self.once(clock)
            except ArchiveConflict:
                self.conflicts += 1
            except (ArchiveError, OSError, Killed):
                pass

    def once(self, clock: ManualClock) -> None:
        run = Archiver("sim://archive", spark=object(), clock=clock)  # type: ignore[arg-type]
        run.take_in(str(self._data))
        if self.rng.random() < 0.3:
            run.compact()
        run.end()
        self.commits += 1

    def run(self) -> None:
        """Run all archivers; then a single archiver brings the archive up to date."""
        before = chance.use(random.Random(self.rng.random()))
        try:
            for number in range(self.rng.randrange(2, 5)):
                days = self.rng.choice((0, 0, 31, -20_000))
                self.turns.run(f"archiver-{number}", lambda days=days: self._archiver(days))  # type: ignore[misc]
            self.turns.go()
            if self.judge.broken is not None:
                raise self.judge.broken
            self.turns.calm = True
            for _ in range(3):
                # The first run may only complete the commit of a killed archiver.
                try:
                    self.once(ManualClock())
                    break
                except ArchiveConflict:
                    continue
            else:
                raise self.judge.fail("a single archiver does not succeed")
        finally:
            chance.use(before)
        self.judge.check()
        if self.judge.reported > self.judge.offset or self.judge.offset != self.log:
            raise self.judge.fail(f"{self.log} messages, {self.judge.offset} archived, {self.judge.reported} reported")
