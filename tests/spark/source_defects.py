"""Defects of filters that Spark pushes down, to plant in the source: generated filters must find them."""

from __future__ import annotations

import pytest

Patch = pytest.MonkeyPatch


def negate_what_is_true_of_null(patch: Patch) -> None:
    """A negated filter becomes a negated condition, although the column is null where the header is not."""
    from pyspark.sql.datasource import Filter, Not

    from plait.spark.source import filters

    shipped = filters.condition_of

    def naive(pushed: Filter, schema: object) -> str | None:
        if not isinstance(pushed, Not):
            return shipped(pushed, schema)  # type: ignore[arg-type]
        child = shipped(pushed.child, schema)  # type: ignore[arg-type]
        return None if child is None else f"NOT ({child})"

    patch.setattr(filters, "condition_of", naive)


def compare_every_double_exactly(patch: Patch) -> None:
    """A large integer differs from the double that it becomes in the column."""
    from plait.spark.source import filters

    patch.setattr(filters, "_EXACT_END", 1 << 60)
