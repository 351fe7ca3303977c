"""Recurring messages: each firing is stored once, and none early, whatever crashes between any two steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.meta.firing_model import FiringModel

RUNS, STEPS = 25, 50


@pytest.mark.parametrize("first", range(0, 200, RUNS))
def test_each_firing_is_stored_once_and_none_early(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + RUNS):
        model = FiringModel(seed, tmp_path)
        try:
            model.run(STEPS)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            model.close()
