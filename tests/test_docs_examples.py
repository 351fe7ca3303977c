"""The examples of the user documentation run, each against a new broker."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from plait.testing import EmbeddedBroker

DOCS = Path(__file__).resolve().parent.parent / "docs"
ADDRESS = "plait://127.0.0.1:7450"
PAGES = [
    "sending",
    "consuming",
    "filters",
    "app",
    "ordered",
    "groups",
    "recurring",
    "transactions",
    "outbox",
    "query",
    "request",
]
#: Examples with an address are complete programs and run unchanged.
EXAMPLES = {
    f"{page}-{number}": source
    for page in PAGES
    for number, source in enumerate(re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL))
    if "import plait" in source
}


@pytest.mark.parametrize("name", EXAMPLES)
async def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Examples create their databases in the working directory.
    monkeypatch.chdir(tmp_path)
    async with EmbeddedBroker() as broker:
        source = EXAMPLES[name].replace(ADDRESS, broker.address)
        assert source != EXAMPLES[name], "the example names no address"
        code = compile(source, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        result = eval(code, {"__name__": "example"})
        if inspect.isawaitable(result):
            await result


def test_there_are_examples():
    assert len(EXAMPLES) == 21
