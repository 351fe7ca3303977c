"""After a crash, every name is old or new, never both."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plait.testing.simulated_disk import SimulatedDisk
from tests.testing.crashes import RANDOMS, durable, outcomes


def test_a_created_file_may_be_lost_until_its_directory_is_synced():
    disk = SimulatedDisk()
    file = disk.open("a", create=True)
    file.write([b"x"], 0)
    file.sync()
    assert outcomes(disk, lambda after: tuple(after.list(""))) == {(), ("a",)}
    disk.sync_directory("")
    assert outcomes(disk, lambda after: after.read("a")) == {b"x"}


def test_a_rename_is_old_or_new_until_its_directory_is_synced():
    disk = SimulatedDisk()
    durable(disk, "checkpoint", b"old")
    durable(disk, "checkpoint.new", b"new")
    disk.rename("checkpoint.new", "checkpoint")
    seen = outcomes(disk, lambda after: (after.read("checkpoint"), after.exists("checkpoint.new")))
    assert seen == {(b"old", True), (b"new", False)}
    disk.sync_directory("")
    assert outcomes(disk, lambda after: after.read("checkpoint")) == {b"new"}


def test_a_synced_rename_does_not_keep_unsynced_contents():
    disk = SimulatedDisk()
    disk.open("new", create=True).write([b"x" * 10], 0)
    disk.rename("new", "name")
    disk.sync_directory("")
    assert outcomes(disk, lambda after: after.read("name")) == {b"", bytes(10), b"x" * 10}


def test_a_rename_between_directories_needs_both_synced():
    for order in (("d", "e"), ("e", "d")):
        disk = SimulatedDisk()
        disk.make_directory("d")
        disk.make_directory("e")
        durable(disk, "d/a", b"x")
        disk.rename("d/a", "e/a")
        disk.sync_directory(order[0])
        seen = outcomes(disk, lambda after: (after.exists("d/a"), after.exists("e/a")))
        assert seen == {(True, False), (False, True)}
        disk.sync_directory(order[1])
        assert outcomes(disk, lambda after: after.list("e")[0]) == {"a"}


def test_a_durable_removal_makes_the_rename_before_it_durable():
    disk = SimulatedDisk()
    disk.make_directory("d")
    disk.make_directory("e")
    durable(disk, "d/a", b"x")
    disk.rename("d/a", "e/a")
    disk.remove("e/a")
    disk.sync_directory("e")
    assert outcomes(disk, lambda after: (*after.list("d"), *after.list("e"))) == {()}


def test_a_directory_is_durable_when_made_and_makes_no_other_name_durable():
    disk = SimulatedDisk()
    disk.open("a", create=True)
    disk.make_directory("d/e")
    assert outcomes(disk, lambda after: tuple(after.list(""))) == {("d",), ("a", "d")}
    assert outcomes(disk, lambda after: after.exists("d/e")) == {True}


def test_a_directory_with_the_name_of_a_removed_file_makes_the_removal_durable():
    disk = SimulatedDisk()
    durable(disk, "a", b"x")
    disk.rename("a", "b")
    disk.make_directory("a")
    assert outcomes(disk, lambda after: (after.list("a") == [], after.read("b"))) == {(True, b"x")}


PATHS = st.sampled_from(["d/a", "d/b", "d/c", "e/a", "e/b"])
NAME_ACTIONS = st.one_of(
    st.tuples(st.just("create"), PATHS),
    st.tuples(st.just("rename"), PATHS, PATHS),
    st.tuples(st.just("remove"), PATHS),
    st.tuples(st.just("sync_directory"), st.sampled_from(["d", "e"])),
)


def contents(disk: SimulatedDisk) -> dict[str, bytes]:
    paths = [f"{directory}/{name}" for directory in "de" for name in disk.list(directory)]
    return {path: disk.read(path) for path in paths}


@given(st.lists(NAME_ACTIONS, max_size=20), RANDOMS)
def test_no_file_has_two_names_and_synced_names_survive(actions: list[tuple[Any, ...]], rng: random.Random):
    disk = SimulatedDisk()
    disk.make_directory("d")
    disk.make_directory("e")
    history = [contents(disk)]
    synced = {"d": 0, "e": 0}
    crossed = False
    for number, (kind, *paths) in enumerate(actions):
        if kind == "create" and not disk.exists(paths[0]):
            file = disk.open(paths[0], create=True)
            file.write([bytes([number])], 0)
            file.sync()
        elif kind == "rename" and disk.exists(paths[0]):
            disk.rename(*paths)
            crossed |= paths[0][0] != paths[1][0]
        elif kind in ("remove", "sync_directory"):
            getattr(disk, kind)(*paths)
        history.append(contents(disk))
        if kind == "sync_directory":
            synced[paths[0]] = len(history) - 1
    for _ in range(5):
        found = contents(disk.after_crash(rng))
        assert len(set(found.values())) == len(found)
        for path in {*found, *history[-1]}:
            # A rename from the other directory is durable when both directories are synced.
            since = min(synced.values()) if crossed else synced[path[0]]
            assert found.get(path) in [state.get(path) for state in history[since:]]
    for directory in "de":
        disk.sync_directory(directory)
    assert contents(disk.after_crash(rng)) == history[-1]
