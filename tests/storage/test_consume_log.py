"""The consume log against a plain list of records."""

from __future__ import annotations

import tracemalloc

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from plait.storage.logs.consume_log import DIRECTORY, RECORD, ConsumeLog, Record
from plait.testing.simulated_disk import SimulatedDisk


def new_disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_directory(DIRECTORY)
    return disk


def flush(log: ConsumeLog) -> None:
    at, data = log.flush()
    log.write_records(at, data)
    log.flushed_to(at, data)


class ConsumeLogMachine(RuleBasedStateMachine):
    """Records in memory, in the file, or in both are found the same way."""

    @initialize()
    def start(self) -> None:
        self.disk = new_disk()
        self.log = ConsumeLog(self.disk, 7)
        self.model: list[Record] = []
        #: (generation, records) that a checkpoint names.
        self.checkpoint = (0, 0)

    @rule(gap=st.integers(0, 3), count=st.integers(1, 5), size=st.integers(1, 9), step=st.integers(-3, 5))
    def append(self, gap: int, count: int, size: int, step: int) -> None:
        """Gaps are rows lost to damage. Store times may step back."""
        last = self.model[-1] if self.model else Record(0, 0, 100, 0, 0)
        record = Record(last.end + gap, last.offset + last.size + gap, last.time + step, size * 8, count)
        self.log.append(*record)
        self.model.append(record)

    @rule()
    def flush(self) -> None:
        flush(self.log)
        self.disk.sync_directory(DIRECTORY)
        self.checkpoint = (self.log.generation, len(self.model))

    @rule(count=st.integers(1, 3))
    def append_while_flushing(self, count: int) -> None:
        at, data = self.log.flush()
        for _ in range(count):
            self.append(0, 1, 1, 1)
        self.log.write_records(at, data)
        self.log.flushed_to(at, data)

    @rule()
    def flush_that_does_not_finish(self) -> None:
        """The file has more records than the checkpoint names, and the log does not know it."""
        at, data = self.log.flush()
        self.log.write_records(at, data)

    @rule()
    def crash(self) -> None:
        """Return to the checkpoint; later records are rebuilt from the message log."""
        self.disk = self.disk.after_crash()
        generation, count = self.checkpoint
        kept, rest = self.model[:count], self.model[count:]
        self.log = ConsumeLog(self.disk, 7)
        assert self.log.load(generation, count, kept[-1].end if kept else 0)
        for record in rest:
            self.log.append(*record)

    @rule(first=st.integers(0, 10))
    def drop_the_oldest(self, first: int) -> None:
        first = min(first, len(self.model))
        self.log.replace(self.log.slice(first, len(self.log)).copy())
        self.model = self.model[first:]
        flush(self.log)
        self.disk.sync_directory(DIRECTORY)
        self.checkpoint = (self.log.generation, len(self.model))

    @rule()
    def unmap(self) -> None:
        self.log.unmap()
        assert not self.log.mapped

    @rule(sequence=st.integers(0, 80))
    def find(self, sequence: int) -> None:
        expected = next((i for i, r in enumerate(self.model) if sequence < r.end), len(self.model))
        assert self.log.find(sequence) == expected

    @rule(offset=st.integers(0, 800))
    def find_offset(self, offset: int) -> None:
        expected = next((i for i, r in enumerate(self.model) if r.offset >= offset), len(self.model))
        assert self.log.find_offset(offset) == expected

    @rule(time=st.integers(90, 160))
    def find_time(self, time: int) -> None:
        expected = next((i for i, r in enumerate(self.model) if r.time >= time), len(self.model))
        assert self.log.find_time(time) == expected

    @rule(start=st.integers(0, 20), size=st.integers(0, 20))
    def slice(self, start: int, size: int) -> None:
        start = min(start, len(self.model))
        sliced = self.log.slice(start, start + size)
        assert sliced.dtype == RECORD
        assert [Record(*values) for values in sliced.tolist()] == self.model[start : start + size]

    @invariant()
    def the_same_records(self) -> None:
        if not hasattr(self, "log"):
            return
        assert len(self.log) == len(self.model)
        for index in {0, len(self.model) // 2, len(self.model) - 1} & set(range(len(self.model))):
            assert self.log.record(index) == self.model[index]


TestConsumeLog = ConsumeLogMachine.TestCase
TestConsumeLog.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def three_records() -> tuple[SimulatedDisk, ConsumeLog]:
    disk = new_disk()
    log = ConsumeLog(disk, 7)
    for number in range(3):
        log.append(number * 10, number * 64, number, 64, 10)
    flush(log)
    return disk, log


def test_a_file_that_does_not_match_the_checkpoint_must_be_rebuilt():
    disk, log = three_records()
    again = ConsumeLog(disk, 7)
    assert again.load(0, 3, 30)
    assert not again.load(0, 3, 40), "its last record has another end"
    assert not again.load(0, 4, 40), "it is too short"
    assert not again.load(1, 3, 30), "it does not exist"
    assert again.load(1, 0, 0), "the checkpoint names no records"
    disk.open(log.path).truncate(50)
    assert not again.load(0, 3, 30), "it was cut"


def test_records_after_those_of_the_checkpoint_are_overwritten():
    disk, log = three_records()
    again = ConsumeLog(disk, 7)
    assert again.load(0, 2, 20)
    again.append(20, 999, 5, 64, 1)
    flush(again)
    assert disk.open(log.path).size == 3 * RECORD.itemsize
    third = ConsumeLog(disk, 7)
    assert third.load(0, 3, 21)
    assert third.record(2) == Record(20, 999, 5, 64, 1)


def test_finding_and_slicing_a_few_records_does_not_copy_all_that_are_in_memory():
    log = ConsumeLog(new_disk(), 7)
    for number in range(20_000):
        log.append(number, number * 64, number, 64, 1)
    tracemalloc.start()
    assert log.slice(9_000, 9_002)["base"].tolist() == [9_000, 9_001]
    assert log.find_offset(9_001 * 64 - 1) == 9_001
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100_000
