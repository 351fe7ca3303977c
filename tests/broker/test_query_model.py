"""Queries of a broker give what a search of all visible messages gives, whatever is indexed.

Random operations: sends with keys whose hashes collide, pieces of the work on indexes, new segments, retention,
subjects that are deleted and created again, crashes, and index files that are damaged, cut, swapped or removed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from plait.broker.query import message_index, search
from plait.broker.query.search import QueryBatch, QueryTerms, Search, span
from plait.errors import PlaitError
from plait.filter import scan_budget
from plait.filter.message_filter import compile_filter
from plait.frame.builder import build_frame
from plait.frame.columns import Column
from plait.frame.view import frames_in
from plait.model.filter_terms import FilterTerms
from plait.model.logical_partitions import NO_KEY_HASH, restamp
from plait.model.settings import SubjectSettings
from plait.storage.index import index_builder
from plait.storage.index.index_file import DIRECTORY, DRAFT
from tests.support.broker_node import Node, Producer, Sent

SUBJECTS = ("a", "b")
#: Keys of two have the same hash, and keys of four the same upper half of it.
KEYS = {f"k{n}": ((n // 4) << 40) + n // 2 % 2 + (7 << 50) for n in range(12)}
EVEN = compile_filter(FilterTerms(where="key IN ('k0', 'k2', 'k4', 'k6')"))

#: (sequence, producer, number, key, store time) of a message.
Stored = tuple[int, int, int, str, int]


class QueryModel:
    """A node whose index is built piece by piece."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.node = Node(
            flush=self.draw.choice(("sync", "async")), message_segment_size=self.draw.choice((2048, 8192, 32768))
        )
        self.producers = [Producer(number) for number in (70, 71)]
        self.work: message_index.IndexWork | None = None

    # --- operations -----------------------------------------------------------------------------

    def send(self) -> None:
        for _ in range(self.draw.randrange(1, 4)):
            count = self.draw.choice((1, 1, 3, 20))
            producer, subject = self.draw.choice(self.producers), self.draw.choice(SUBJECTS)
            keys = self.draw.choices([*KEYS, ""], k=count)
            hashes = None
            if self.draw.random() < 0.8:
                hashes = np.array([KEYS[key] if key else NO_KEY_HASH for key in keys], np.uint64)
                if self.draw.random() < 0.2:
                    # Another partition refused them.
                    hashes = restamp(hashes, np.array([3, 700], np.uint64))
            parts = build_frame(
                [b"x"] * count,
                producer=producer.id,
                first=producer.next,
                previous=producer.last.get(subject, 0),
                keys=None if hashes is None else [key.encode() for key in keys],
                key_hashes=hashes,
            )
            producer.next += count
            producer.last[subject] = producer.next - 1
            self.node.submit(Sent(subject, parts.tobytes(), []))
        if self.draw.random() < 0.8:
            self.node.turn()

    def index(self) -> None:
        """Do some of the work; now and then it is left half done."""
        index = self.node.broker.message_index
        if self.work is None:
            index.look()
        for _ in range(self.draw.choice((1, 2, 5, 100))):
            self.work = self.work or index.begin()
            if self.work is None:
                return
            if self.draw.random() < 0.1:
                return
            work, self.work = self.work, None
            try:
                work.run()
                work.done()
            except OSError:
                # The draft of the file was removed.
                index.give_up()
                return

    def roll(self) -> None:
        self.node.turn()
        self.node.broker.message_log.roll()
        self.node.turn()

    def settle(self) -> None:
        self.node.turn()
        self.node.sync()

    def time(self) -> None:
        # The wall clock may be set back.
        self.node.clock.advance(self.draw.random() * 5)
        if self.draw.random() < 0.2:
            self.node.clock.jump(-self.draw.random() * 5)

    def expire(self) -> None:
        subject = self.draw.choice(SUBJECTS)
        if subject in self.node.broker.subjects:
            self.node.broker.catalog.update_subject(subject, SubjectSettings(self.draw.choice((3.0, None))))
        for _ in self.node.retention.steps():
            self.node.turn()
        self.node.checkpoint()
        self.node.retention.run()
        self.node.turn()

    def delete(self) -> None:
        subject = self.draw.choice(SUBJECTS)
        if subject in self.node.broker.subjects:
            self.node.broker.delete_subject(subject)
            self.node.turn()
            for producer in self.producers:
                producer.last.pop(subject, None)

    def crash(self) -> None:
        self.work = None
        end = self.draw.choice((self.node.killed, self.node.power_lost, self.node.restart))
        self.node = end()
        for producer in self.producers:
            # As a client does after a crash: what may be lost is sent by a new producer.
            producer.id += 10
            producer.last.clear()

    def damage(self) -> None:
        """Damage an index file."""
        disk = self.node.disk
        # A process that maps a file does not survive that another one cuts it.
        names = [name for name in disk.list(DIRECTORY) if not name.endswith(DRAFT)]
        if not names:
            return
        path = f"{DIRECTORY}/{self.draw.choice(names)}"
        size = len(disk.read(path))
        match self.draw.randrange(4):
            case 0 if size:
                disk.flip_bit(path, self.draw.randrange(size), self.draw.randrange(8))
            case 1:
                file = disk.open(path)
                file.truncate(self.draw.randrange(size + 1))
                file.close()
            case 2:
                disk.rename(path, f"{DIRECTORY}/{self.draw.choice(names)}")
            case 3:
                disk.remove(path)
        # Files that are open are not read again.
        self.node.broker.message_index._open.clear()

    def step(self) -> None:
        actions: list[Callable[[], None]] = [self.send, self.index, self.index, self.send, self.time, self.settle]
        rare = [self.roll, self.expire, self.delete, self.crash, self.damage]
        try:
            self.draw.choice(actions if self.draw.random() < 0.8 else rare)()
        except PlaitError:
            # The subject was deleted.
            self.node.turn()

    # --- comparing ------------------------------------------------------------------------------

    def stored(self, subject: str) -> list[Stored]:
        """All visible messages."""
        if subject not in self.node.broker.subjects:
            return []
        partition, log = self.node.partition(subject), self.node.broker.message_log
        rows: list[Stored] = []
        for first, last, frame in partition.walk(log, partition.start, partition.visible):
            assert frame is not None
            rows += [row for row in rows_of(frame) if first <= row[0] < last]
        return rows

    def check(self) -> None:
        for subject in SUBJECTS:
            rows = self.stored(subject)
            keys = [self.draw.choice(list(KEYS)) for _ in range(2)]
            for key in keys:
                terms = QueryTerms((key.encode(), KEYS[key]))
                assert self.found(subject, terms) == [row for row in rows if row[3] == key], (subject, key)
            if rows:
                row = self.draw.choice(rows)
                assert row in self.found(subject, QueryTerms(message_id=(row[1], row[2])))
                since, until = sorted((self.draw.choice(rows)[4], self.draw.choice(rows)[4]))
                timed = [row for row in rows if row[3] == keys[0] and since <= row[4] < until]
                key = (keys[0].encode(), KEYS[keys[0]])
                assert self.found(subject, QueryTerms(key, since=since, until=until)) == timed
            even = [row for row in rows if row[3] in ("k0", "k2", "k4", "k6")]
            assert self.found(subject, QueryTerms(matching=EVEN)) == even
            assert not self.found(subject, QueryTerms(message_id=(70, 1 << 40)))

    def found(self, subject: str, terms: QueryTerms) -> list[Stored]:
        if subject not in self.node.broker.subjects:
            return []
        broker, partition = self.node.broker, self.node.partition(subject)
        start, end = span(partition, terms.since, terms.until)
        rows: list[Stored] = []
        while True:
            count = self.draw.choice((1, 3, 1000))
            batch: QueryBatch = Search(
                partition, broker.message_log, broker.message_index, terms, broker.turn.scans.budget
            ).run(start, end, count, self.draw.choice((1, 1 << 20)))
            assert batch.count <= count
            for frame in frames_in(b"".join(batch.parts)):
                rows += rows_of(frame.verify())
            if not batch.more:
                return rows
            assert batch.next >= start
            broker.turn.scans.next_turn()
            start = batch.next


def rows_of(frame: Any) -> list[Stored]:
    producers, numbers = frame.message_ids()
    keys = frame.binary(Column.KEY).to_pylist() if frame.has(Column.KEY) else [b""] * frame.count
    columns = (frame.sequences().tolist(), producers.tolist(), numbers.tolist(), [key.decode() for key in keys])
    return [(*row, frame.store_time) for row in zip(*columns, strict=True)]


@pytest.mark.parametrize("seed", range(200))
def test_queries_find_what_a_search_of_everything_finds(seed: int, monkeypatch: pytest.MonkeyPatch):
    run_queries(seed, monkeypatch)


def run_queries(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run of the model, with limits that are drawn too."""
    draw = random.Random(f"{seed} limits")
    monkeypatch.setattr(message_index, "AHEAD_SIZE", draw.choice((1, 3000)))
    monkeypatch.setattr(index_builder, "PART_ENTRIES", draw.choice((5, 40, 1 << 20)))
    monkeypatch.setattr(scan_budget, "FILTER_SCAN_FRAMES", draw.choice((1, 4, 500)))
    monkeypatch.setattr(search, "LOOKUP_MAX", draw.choice((1, 2, 4096)))
    model = QueryModel(seed)
    for number in range(50):
        model.step()
        if number % 10 == 0:
            model.check()
    model.check()
