"""Imports of third-party modules that not every machine has."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def client_module(name: str) -> Any:
    """Import a module when it is needed: the other peers and the type checker must work without it."""
    return importlib.import_module(name)


def is_installed(name: str) -> bool:
    """Whether `client_module(name)` would find the module."""
    return importlib.util.find_spec(name) is not None
