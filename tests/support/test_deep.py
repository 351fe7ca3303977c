"""A long run's state survives an interruption and is discarded for other sources or another seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.deep import Cycles, DeepState, derive, fingerprint


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "deep.json"


def test_passed_tests_are_remembered_for_the_same_sources(path: Path):
    first = DeepState(path, "v1")
    first.finish("t1")
    second = DeepState(path, "v1")
    assert second.passed == {"t1"}
    assert second.seed == first.seed


def test_changed_sources_discard_the_state(path: Path):
    DeepState(path, "v1", seed=1).finish("t1")
    assert DeepState(path, "v2").passed == set()


def test_another_seed_discards_the_state(path: Path):
    DeepState(path, "v1", seed=1).finish("t1")
    assert DeepState(path, "v1", seed=2).passed == set()
    assert DeepState(path, "v1", seed=1).passed == {"t1"}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"seed": 1}', "null"])
def test_a_damaged_state_file_is_discarded(path: Path, content: str):
    path.parent.mkdir()
    path.write_text(content)
    assert DeepState(path, "v1").passed == set()


def test_cycles_resume_where_they_stopped(path: Path):
    state = DeepState(path, "v1")
    for number in Cycles("t1", state)(10):
        if number == 4:
            break
    assert list(Cycles("t1", DeepState(path, "v1"))(10)) == [4, 5, 6, 7, 8, 9]


def test_no_cycle_begins_when_time_is_up_and_the_next_run_resumes_there(path: Path):
    now = 0.0
    state = DeepState(path, "v1", seconds=10.0, clock=lambda: now)
    cycles = Cycles("t1", state)(10)
    for number in range(3):
        assert next(cycles) == number
        now += 4.0
    with pytest.raises(pytest.skip.Exception, match="time is up after 3 of 10 cycles"):
        next(cycles)
    assert next(iter(Cycles("t1", DeepState(path, "v1"))(10))) == 3


def test_cycles_without_state_all_run():
    assert list(Cycles("t1", None)(3)) == [0, 1, 2]


def test_a_finished_run_leaves_no_file(path: Path):
    state = DeepState(path, "v1")
    state.finish("t1")
    assert path.exists()
    state.forget(["t1"])
    assert not path.exists()


def test_tests_get_different_seeds_from_one_run():
    assert derive(1, "a") == derive(1, "a")
    assert len({derive(1, "a"), derive(1, "b"), derive(2, "a")}) == 3


def test_the_fingerprint_changes_with_content_and_name(tmp_path: Path):
    (tmp_path / "plait").mkdir()
    source = tmp_path / "plait" / "a.py"
    source.write_text("x = 1")
    first = fingerprint(tmp_path)
    source.write_text("x = 2")
    second = fingerprint(tmp_path)
    source.rename(tmp_path / "plait" / "b.py")
    assert len({first, second, fingerprint(tmp_path)}) == 3
