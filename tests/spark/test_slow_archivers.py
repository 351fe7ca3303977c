"""Archivers of different speed, killed at any step, on a store that can only put files, from a seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.archiver_defects import DEFECTS, Plant
from tests.spark.slow_archivers import Archivers
from tests.support.deep import Cycles


def explore(seeds: range, data: Path) -> int:
    """Run all seeds; returns the number of commits."""
    commits = 0
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            archivers = Archivers(seed, data, patch)
            try:
                archivers.run()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
            commits += archivers.commits
    return commits


def test_archivers_of_any_speed_lose_nothing_and_repeat_nothing(tmp_path: Path, seed: int):
    assert explore(range(seed, seed + 8), tmp_path / "data") > 50


@pytest.mark.deep("spark")
def test_archivers_of_any_speed_lose_nothing_and_repeat_nothing_with_many_seeds(
    tmp_path: Path, seed: int, cycles: Cycles
):
    for number in cycles(100):
        explore(range(seed + 1000 * number, seed + 1000 * number + 50), tmp_path / "data")


@pytest.mark.parametrize("plant", DEFECTS, ids=lambda plant: plant.__name__)
def test_a_defective_commit_is_found(tmp_path: Path, plant: Plant):
    # The first few seeds find most defects.
    for seed in (10, 2, 0, 4, *range(30)):
        with pytest.MonkeyPatch.context() as patch:
            archivers = Archivers(seed, tmp_path / "data", patch)
            plant(patch, archivers)
            try:
                archivers.run()
            except AssertionError:
                return
    pytest.fail("30 seeds did not find the defect")
