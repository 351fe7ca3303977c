"""A node that the tests of client commands share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from plait.cli.entry import run
from tests.cli.commands import Serving, serve

#: Runs a command in this process, for tests that run many commands; other tests start processes.
Here = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serve(tmp_path_factory.mktemp("node") / "data") as serving:
        yield serving


_numbers = count()


@pytest.fixture
def subject() -> str:
    return f"test.{next(_numbers)}"


@pytest.fixture
def call(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.delenv("PLAIT_DEBUG", raising=False)

    def call(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        code = run(arguments)
        out, err = capfdbinary.readouterr()
        return subprocess.CompletedProcess(arguments, code, out, err)

    return call


@pytest.fixture
def here(node: Serving, call: Here, monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.setenv("PLAIT_SERVER", node.address)
    return call
