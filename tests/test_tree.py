"""The shape of the package: small rooms, small files, short import cycles, one meaning for each class name."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "plait"
#: Lines of a tree. A change that needs more lines raises its number in the same commit.
TREE_LINES_MAX = {"plait": 77_500, "tests": 76_500}
CYCLE_MODULES_MAX = 3
ROOM_MODULES_MAX = 14
FILE_LINES_MAX = 400
CLASS_LINES_MAX = 300
FUNCTION_LINES_MAX = 60
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def definitions() -> Iterator[tuple[str, Definition]]:
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, Definition):
                yield name, node


def lines(node: Definition) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_no_room_has_too_many_modules():
    modules = Counter(str(Path(name).parent) for name in TREES if not name.endswith("__init__.py"))
    assert {room: count for room, count in modules.items() if count > ROOM_MODULES_MAX} == {}


def test_every_room_is_introduced():
    rooms = [name for name in TREES if name.endswith("__init__.py")]
    assert [name for name in rooms if len((ast.get_docstring(TREES[name]) or "").split()) < 8] == []


def test_no_file_is_too_long():
    sizes = {name: (PACKAGE / name).read_text().count("\n") for name in TREES}
    assert {name: size for name, size in sizes.items() if size > FILE_LINES_MAX} == {}


@pytest.mark.parametrize(
    ("kind", "limit"),
    [(ast.ClassDef, CLASS_LINES_MAX), (ast.FunctionDef | ast.AsyncFunctionDef, FUNCTION_LINES_MAX)],
    ids=["class", "function"],
)
def test_no_definition_is_too_long(kind: type[Definition], limit: int):
    sizes = [(f"{name}:{node.name}", lines(node)) for name, node in definitions() if isinstance(node, kind)]
    assert [(name, size) for name, size in sizes if size > limit] == []


@pytest.mark.parametrize("tree", TREE_LINES_MAX)
def test_no_tree_has_too_many_lines(tree: str):
    assert sum(path.read_text().count("\n") for path in (ROOT / tree).rglob("*.py")) <= TREE_LINES_MAX[tree]


def import_graph() -> dict[str, set[str]]:
    """Module → the modules of the package that it imports, anywhere in its file and for types only too."""
    modules = {f"plait.{name.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__"): name for name in TREES}
    graph: dict[str, set[str]] = {}
    for module, name in modules.items():
        found: set[str] = set()
        for node in ast.walk(TREES[name]):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                named = [f"{node.module}.{alias.name}" for alias in node.names]
                found.update(path if path in modules else node.module for path in named)
        graph[module] = found & modules.keys() - {module}
    return graph


def import_cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that all import each other, directly or through others."""
    reached: dict[str, set[str]] = {}
    for module in graph:
        seen: set[str] = set()
        waiting = [module]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting.extend(new)
        reached[module] = seen
    cycles = {frozenset({other for other in reached[module] if module in reached[other]}) for module in graph}
    return [set(cycle) for cycle in cycles if cycle]


def test_no_import_cycle_is_too_large():
    assert [sorted(cycle) for cycle in import_cycles(import_graph()) if len(cycle) > CYCLE_MODULES_MAX] == []


def test_an_import_cycle_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"d", "a"}, "d": set(), "e": {"f"}, "f": {"e", "a"}}
    assert sorted(map(sorted, import_cycles(graph))) == [["a", "b", "c"], ["e", "f"]]


def test_every_class_has_a_name_of_its_own():
    places = defaultdict(list)
    for name, node in definitions():
        if isinstance(node, ast.ClassDef):
            places[node.name].append(name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
