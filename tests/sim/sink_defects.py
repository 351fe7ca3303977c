"""A defect of the sink's exactly-once writes. Tests patch it into Plait's classes."""

from __future__ import annotations

import pytest

from plait.meta.batch_commits import ClusterAge


def forget_decisions_by_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    """The age of a decision is computed from the meta server's wall clock."""
    patch.setattr(ClusterAge, "advance", lambda age, connection: age._clock.now() // 1_000_000)
