"""One node for all commands that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from tests.cli.commands import Serving, serve


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A node that lives as long as the tests."""
    with serve(tmp_path_factory.mktemp("node") / "data") as serving:
        yield serving


_numbers = count()


@pytest.fixture
def subject() -> str:
    """A subject that no other test uses."""
    return f"test.{next(_numbers)}"
