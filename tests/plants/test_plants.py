"""A generator finds each planted defect, and the same seeds pass without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plants.generators import finds
from tests.plants.registry import PLANTS, Plant

QUICK = [plant for plant in PLANTS if plant.seeds]


def found_by(plant: Plant, seeds: range | tuple[int, ...]) -> int | None:
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            plant.defect(patch)
            if finds(plant.generator, seed) is not None:
                return seed
    return None


def look_for(plant: Plant, seeds: range | tuple[int, ...]) -> None:
    seed = found_by(plant, seeds)
    assert seed is not None, f"{plant.generator.name} did not find {plant.name} with {len(seeds)} seeds"
    wrong = finds(plant.generator, seed)
    assert wrong is None, f"seed {seed} fails without {plant.name}, too: {wrong}"


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_what_a_planted_defect_patches_exists(plant: Plant, monkeypatch: pytest.MonkeyPatch):
    """Most defects are planted only in the deep tests; a renamed method must be noticed before."""
    plant.defect(monkeypatch)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("plant", QUICK, ids=lambda plant: plant.name)
def test_a_generator_finds_a_planted_defect(plant: Plant):
    look_for(plant, plant.seeds)


@pytest.mark.deep("plants")
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_generator_finds_a_defect_with_seeds_that_no_one_chose(plant: Plant, seed: int):
    look_for(plant, range(seed, seed + plant.generator.seeds))


def test_the_table_of_defects_is_complete():
    text = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
    assert [plant.name for plant in PLANTS if f"`{plant.name}`" not in text] == []
    assert len({plant.name for plant in PLANTS}) == len(PLANTS) >= 26
    assert len(QUICK) >= 12
