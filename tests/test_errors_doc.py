"""docs/errors.md agrees with the classes of errors."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import NamedTuple

from plait import errors
from plait.client.requests import request_errors

PAGE = Path(__file__).resolve().parent.parent / "docs" / "errors.md"


class Row(NamedTuple):
    """One line of the page's table: as written, or as the code requires."""

    name: str
    code: str
    retry: str
    exit_code: str
    meaning: str


def classes() -> list[type[errors.PlaitError]]:
    found = [value for module in (errors, request_errors) for value in vars(module).values() if inspect.isclass(value)]
    return [kind for kind in dict.fromkeys(found) if issubclass(kind, errors.PlaitError)]


def cells(columns: int) -> list[list[str]]:
    """The cells of every table line of the page with ``columns`` columns, without header lines."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    split = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in split if len(row) == columns and row[0] not in ("error", "exit", "---")]


def test_the_page_lists_every_error_as_the_code_defines_it():
    expected = [
        Row(
            f"`{kind.__name__}`",
            f"`{kind.code}`",
            "yes" if kind.retryable else "no",
            str(kind.exit_code),
            " ".join((inspect.getdoc(kind) or "").split()).replace("``", "`"),
        )
        for kind in classes()
    ]
    assert [Row(*row[:5]) for row in cells(6)] == expected


def test_every_error_has_advice():
    assert [row[0] for row in cells(6) if len(row[5]) < 10] == []


def test_every_exit_code_is_explained():
    explained = [int(row[0]) for row in cells(2) if row[0].isdigit()]
    assert explained == sorted({0, *(kind.exit_code for kind in classes())})


def test_the_page_lists_the_facts_of_every_error():
    promised = {kind.__name__: kind.facts for kind in classes() if kind.facts}
    page = PAGE.read_text().partition("## Details")[2].partition("## Exit codes")[0]
    lines = re.findall(r"^\| `(\w+)` \| (.+) \|$", page, re.MULTILINE)
    assert {name: tuple(re.findall(r"`(\w+)`", facts)) for name, facts in lines} == promised


def test_every_raised_error_has_its_facts():
    promised = {kind.__name__: kind.facts for kind in classes() if kind.facts}
    missing: list[str] = []
    for path in sorted((PAGE.parent.parent / "plait").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node.func, "id", None) if isinstance(node, ast.Call) else None
            if name in promised:
                given = {keyword.arg for keyword in node.keywords}
                missing += [
                    f"{path}:{node.lineno}: {name}(..., {fact}=)" for fact in promised[name] if fact not in given
                ]
    assert missing == []


def test_codes_are_unique_and_map_to_their_classes():
    assert [errors.BY_CODE[kind.code] for kind in classes()] == classes()


def test_an_error_reply_becomes_its_class_again():
    error = errors.from_code("disk_full", "no room", {"free": 0})
    assert type(error) is errors.DiskFull
    assert (str(error), error.details) == ("no room", {"free": 0})


def test_a_code_of_a_newer_server_becomes_the_root_error():
    assert type(errors.from_code("from_the_future", "what")) is errors.PlaitError
