"""Does a world find what is wrong? Each defect is put back into the shipped classes, and the world of one seed, which
is fine without it, has to notice it.
"""

from __future__ import annotations

import pytest

from tests.sim import world_defects as defects
from tests.sim.world.world import World
from tests.sim.world_defects import Defect

SECONDS, QUIET_SECONDS = 4.0, 12.0
#: What a defect that does not fit the shipped classes any more comes to.
BROKEN_CODE = (TypeError, AttributeError, NameError)

#: The seed whose world shows each.
SHOWN_BY: dict[Defect, int] = {
    defects.deliver_behind_the_fence: 18,
    defects.interrupt_closing: 3,
    defects.start_a_known_group_again_on_new_partitions: 12,
    defects.end_the_app_with_a_body_that_does_not_decode: 4,
}


@pytest.mark.parametrize("defect", SHOWN_BY, ids=lambda defect: defect.__name__)
def test_a_world_finds_a_defect(defect: Defect, monkeypatch: pytest.MonkeyPatch):
    defect(monkeypatch)
    with pytest.raises(AssertionError) as failure:
        World(SHOWN_BY[defect], seconds=SECONDS, quiet_seconds=QUIET_SECONDS).run()
    assert not isinstance(failure.value.__cause__, BROKEN_CODE)


@pytest.mark.parametrize("seed", sorted({*SHOWN_BY.values()}))
def test_the_same_world_is_fine_without_a_defect(seed: int):
    World(seed, seconds=SECONDS, quiet_seconds=QUIET_SECONDS).run()
