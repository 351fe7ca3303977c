"""After a crash, every sector of a file is old or new, and nothing else."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plait.testing.cached_file import SECTOR_SIZE
from plait.testing.simulated_disk import SimulatedDisk, SimulatedFile
from tests.testing.crashes import RANDOMS, durable, outcomes, sectors


def test_unsynced_sectors_survive_in_every_subset():
    disk = SimulatedDisk()
    durable(disk, "a", b"o" * 4 * SECTOR_SIZE).write([b"n" * 4 * SECTOR_SIZE], 0)
    seen = outcomes(disk, lambda after: bytes(part[0] for part in sectors(after.read("a"))))
    assert len(seen) == 16


def test_a_sector_written_again_holds_any_of_its_states():
    disk = SimulatedDisk()
    file = durable(disk, "a", b"0" * 1000)
    for state in (b"1", b"2", b"3"):
        file.write([state * 10], 100)
    seen = outcomes(disk, lambda after: after.read("a")[100:110])
    assert seen == {b"0" * 10, b"1" * 10, b"2" * 10, b"3" * 10}


def test_growth_survives_in_part_and_may_be_zeros():
    disk = SimulatedDisk()
    durable(disk, "a", b"o" * 100).write([b"n" * 1500], 100)
    seen = outcomes(disk, lambda after: after.read("a"))
    assert {len(data) for data in seen} == {100, 512, 1024, 1536, 1600}
    assert b"o" * 100 + bytes(1500) in seen
    assert b"o" * 100 + b"n" * 1500 in seen


def test_bytes_that_a_surviving_cut_removed_never_reappear():
    disk = SimulatedDisk()
    file = durable(disk, "a", b"o" * 1024)
    file.write([b"n" * 1024], 0)
    file.truncate(100)
    file.truncate(2048)
    seen = outcomes(disk, lambda after: after.read("a"))
    for kept in (b"o", b"n"):
        assert kept * 100 + bytes(1948) in seen
    for data in seen:
        # A file of that size may be the one before the cut.
        if len(data) != 1024:
            assert data in [kept * 100 + bytes(len(data) - 100) for kept in (b"o", b"n")]


WRITES = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 3000), st.integers(1, 1500)),
    st.tuples(st.just("allocate"), st.integers(1, 3000)),
    st.tuples(st.just("sync")),
)


def perform(disk: SimulatedDisk, file: SimulatedFile, actions: list[tuple[Any, ...]]) -> list[bytes]:
    """The states of the file since the last sync, the synced one first; each write has distinct bytes."""
    states = [disk.read("a")]
    for number, (kind, *rest) in enumerate(actions, 1):
        if kind == "write":
            file.write([bytes([number]) * rest[1]], rest[0])
        else:
            getattr(file, kind)(*rest)
        states.append(disk.read("a"))
        if kind == "sync":
            states = states[-1:]
    return states


def state_of_sector(state: bytes, number: int) -> bytes:
    return state[number * SECTOR_SIZE : (number + 1) * SECTOR_SIZE].ljust(SECTOR_SIZE, b"\0")


@given(st.lists(WRITES, max_size=12), RANDOMS)
def test_every_sector_after_a_crash_has_a_state_since_the_sync(actions: list[tuple[Any, ...]], rng: random.Random):
    disk = SimulatedDisk()
    states = perform(disk, durable(disk, "a"), actions)
    for _ in range(5):
        found = disk.after_crash(rng).read("a")
        assert len(states[0]) <= len(found) <= len(states[-1])
        assert len(found) % SECTOR_SIZE == 0 or len(found) in {len(state) for state in states}
        for number, part in enumerate(sectors(found)):
            assert part in {state_of_sector(state, number)[: len(part)] for state in states}


CUTS = st.one_of(WRITES, st.tuples(st.just("truncate"), st.integers(0, 3000)))


@given(st.lists(CUTS, max_size=12), RANDOMS)
def test_with_cuts_a_crash_invents_no_state_either(actions: list[tuple[Any, ...]], rng: random.Random):
    disk = SimulatedDisk()
    states = perform(disk, durable(disk, "a"), actions)
    assert disk.after_crash(rng, "none").read("a") == states[0]
    assert disk.after_crash(rng, "all").read("a") == states[-1]
    sizes = [len(state) for state in states]
    for _ in range(5):
        found = disk.after_crash(rng).read("a")
        assert min(sizes) <= len(found) <= max(sizes)
        for number, part in enumerate(sectors(found)):
            # A state that the sector had, or the part of it that a cut left.
            possible = [state_of_sector(state, number) for state in states]
            rest = part.rstrip(b"\0")
            assert any(state.startswith(rest) for state in possible)


@given(st.lists(CUTS, max_size=12), RANDOMS)
def test_the_outcome_of_a_crash_is_final(actions: list[tuple[Any, ...]], rng: random.Random):
    disk = SimulatedDisk()
    perform(disk, durable(disk, "a"), actions)
    after = disk.after_crash(rng)
    assert after.after_crash(rng, "none").read("a") == after.read("a")


def test_the_outcome_of_a_crash_depends_only_on_the_seed_and_leaves_the_disk_unchanged():
    disk = SimulatedDisk()
    file = durable(disk, "a", b"o" * 5000)
    file.write([b"n" * 5000], 100)
    disk.open("b", create=True)
    before = disk.read("a")
    one, two = (disk.after_crash(random.Random(7)) for _ in range(2))
    assert (one.list(""), one.read("a")) == (two.list(""), two.read("a"))
    one.open("a").write([b"x" * 6000], 0)
    assert disk.read("a") == before
    assert two.read("a") != one.read("a")
    file.sync()
    assert disk.after_crash(keep="none").read("a") == before


def test_a_long_history_of_syncs_stays_exact():
    disk = SimulatedDisk()
    file = durable(disk, "a")
    rng = random.Random(3)
    for number in range(400):
        file.write([bytes([number % 256]) * 1000], rng.randrange(20_000))
        file.sync()
    assert disk.after_crash(rng).read("a") == disk.read("a")
