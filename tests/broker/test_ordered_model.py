"""Ordered groups under everything at once (``ordered_world``), and whether the model finds what is wrong."""

from __future__ import annotations

import pytest

from tests.broker.ordered_world import World
from tests.support import ordered_defects as defects
from tests.support.ordered_defects import Defect

#: What a defect that does not fit the shipped classes any more comes to.
BROKEN_CODE = (TypeError, AttributeError, NameError)


@pytest.mark.parametrize("flush", ["async", "sync"])
@pytest.mark.parametrize("seed", range(10))
def test_keys_are_handled_in_order_once_and_completely(seed: int, flush: str):
    World(seed, flush).run(250)


@pytest.mark.parametrize(
    ("defect", "seeds"),
    [
        pytest.param(defects.take_a_row_that_does_not_fit_again, (0, 1, 2), id="51"),
        pytest.param(defects.believe_any_number, (0, 1, 2, 4), id="53"),
        pytest.param(defects.believe_any_key, (3, 4, 5, 7), id="54"),
        pytest.param(defects.believe_any_name, (5, 9, 10), id="7"),
        pytest.param(defects.keep_recovered_keys_apart, (3, 21, 29, 39), id="10"),
    ],
)
def test_the_model_finds_a_defect_that_is_put_back(
    defect: Defect, seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    defect(monkeypatch)
    found = None
    for seed in seeds:
        try:
            World(seed, "async").run(250, cpu_seconds=2.0)
        except BROKEN_CODE:
            raise
        except Exception as error:  # noqa: BLE001 (whatever it is, it is noticed)
            found = error
            break
    assert found is not None, f"{defect.__name__} was not noticed in {len(seeds)} runs"
