"""Fixtures that deep tests share with the ordinary ones."""

from __future__ import annotations

from tests.spark.conftest import spark

__all__ = ["spark"]
