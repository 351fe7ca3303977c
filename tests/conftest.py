"""Loads what the tests share (tests/support), and marks each test with its kind: unit, model, sim or e2e."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

pytest_plugins = ("tests.support.plugin",)

TESTS = Path(__file__).resolve().parent
#: The kind of a test is the first one with a pattern that its file matches.
KINDS = {
    "sim": ("sim/*", "plants/*", "broker/test_crash_points.py", "broker/test_explorer.py"),
    "model": ("broker/test_*_model.py", "broker/test_rules.py", "outbox/test_relay_model.py"),
    "unit": (
        *("broker/*", "frame/*", "golden/*", "meta/*", "storage/*", "testing/*", "wire/*"),
        *("test_chance.py", "test_errors_doc.py", "test_import_rules.py", "test_names.py", "test_prose.py"),
        *("test_public_api.py", "test_repo.py", "test_retry.py", "test_tasks.py", "test_tree.py"),
    ),
    "e2e": ("*",),
}


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.is_relative_to(TESTS):
        name = item.path.relative_to(TESTS).as_posix()
        kind = next(kind for kind, patterns in KINDS.items() if any(fnmatch(name, each) for each in patterns))
        item.add_marker(kind)
