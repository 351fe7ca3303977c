"""The dependency rules between Plait's packages, held by reading the imports.

Every import counts, wherever it stands in a file. A part may import itself, what `MAY_IMPORT` grants it, and
other people's packages, except those that `MUST_NOT_IMPORT` keeps out of it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "plait"

#: The top of the package, ``plait/__init__.py``: what users import.
FACADE = "plait"
BASE = {"errors", "limits", "clock", "chance", "model", "version", "memory"}
SERVER_SIDE = BASE | {"frame", "filter", "storage", "broker", "wire", "meta"}

#: Part → the parts of ours it may import; of a part with a dot, only that package: the structs of requests and replies.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "limits": {"errors"},
    "clock": set(),
    "tasks": {"errors", "limits"},
    "chance": set(),
    "version": set(),
    "model": {"errors", "limits", "version"},
    "memory": {"limits"},
    "frame": {"errors", "limits", "model"},
    "filter": {"errors", "limits", "model", "frame"},
    "storage": BASE | {"frame"},
    "broker": BASE | {"frame", "filter", "storage", "wire.admin"},
    # The frames of recurring messages are kept in the database until a broker has stored them.
    "meta": BASE | {"wire.admin", "frame"},
    "wire": BASE | {"frame"},
    "client": BASE | {"tasks", "frame", "wire"},
    "sync": BASE | {"client"},
    "outbox": BASE | {"tasks", "frame", "client"},
    "spark": BASE | {"frame", "filter", "storage", "client"},
    "server": SERVER_SIDE | {"tasks"},
    "doctor": BASE | {"frame", "storage", "broker", "meta", "wire.admin"},
    "cli": SERVER_SIDE | {"tasks", FACADE, "client", "sync", "server", "spark", "doctor"},
    "testing": SERVER_SIDE | {FACADE, "client", "sync", "server"},
    "__main__": {"cli"},
    FACADE: BASE | {"client", "wire.admin"},
}

LOOP_AND_SOCKETS = {"asyncio", "uvloop", "socket", "socketserver", "selectors", "select", "ssl"}
CHANCE = {"random", "secrets", "uuid"}
TIME_AND_CHANCE = {"time", "datetime", "threading", "concurrent", "multiprocessing"} | CHANCE
DISK = {"os", "mmap", "fcntl", "shutil", "tempfile", "io", "pathlib", "glob"}

#: Part or module → outside modules it must do without. A decision that needs one of these gets its result as
#: an argument instead, so that a test can drive it from a seed.
MUST_NOT_IMPORT: dict[str, set[str]] = {
    "frame": LOOP_AND_SOCKETS | TIME_AND_CHANCE | DISK,
    "storage": LOOP_AND_SOCKETS | TIME_AND_CHANCE | DISK,
    "broker": LOOP_AND_SOCKETS | TIME_AND_CHANCE | DISK,
    "meta": LOOP_AND_SOCKETS | TIME_AND_CHANCE | DISK,
    # These live in real time and on real sockets, but what they leave to chance is drawn in plait/chance.py.
    "wire": CHANCE,
    "client": CHANCE,
    "outbox": CHANCE,
    "server": CHANCE,
}

#: Modules that are the small door to the outside, and what passes through it.
DOORS: dict[str, set[str]] = {
    "storage.disk": DISK,
    # A segment may be made by a thread while the loop needs it, and two threads may sync a log.
    "storage.logs.segment": {"threading"},
    "storage.logs.log": {"threading"},
    # Allocations are written by a thread while another one writes what heartbeats say.
    "meta.database.connection": {"threading"},
    # Calendar arithmetic: no clock is read.
    "meta.recurring.occurrences": {"datetime"},
    # Heartbeats are answered by the loop while another thread decides.
    "meta.database.mirror": {"threading"},
}


@dataclass(frozen=True)
class Import:
    """One import statement's target, as it stands in a module."""

    module: str  # dotted, without the leading package: "storage.log"
    line: int
    target: str  # dotted: "plait.frame.view" or "asyncio"


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    """Every module of the package: its dotted name below it (the facade's is `FACADE`) and its file."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        yield ".".join(parts) or FACADE, path


def imports(package: Path) -> Iterator[Import]:
    """Every import of every module, relative ones made absolute."""
    for module, path in modules(package):
        here = [package.name] if module == FACADE else [package.name, *module.split(".")]
        inside = here if path.name == "__init__.py" else here[:-1]
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(module, node.lineno, alias.name)
            elif isinstance(node, ast.ImportFrom):
                above = inside[: len(inside) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                if base == package.name:
                    for alias in node.names:
                        yield Import(module, node.lineno, f"{base}.{alias.name}")
                else:
                    yield Import(module, node.lineno, base)


def violations(package: Path) -> list[str]:
    """What breaks the rules, one line each."""
    parts = {module.split(".")[0] for module, _ in modules(package)}
    found = [f"{part}: unknown part, give it a line in MAY_IMPORT" for part in sorted(parts - MAY_IMPORT.keys())]
    for seen in imports(package):
        part = seen.module.split(".")[0]
        where = f"plait/{seen.module.replace('.', '/')}:{seen.line}"
        steps = seen.target.split(".")
        if steps[0] == package.name:
            target = steps[1] if len(steps) > 1 and steps[1] in parts else FACADE
            if target != part and not MAY_IMPORT.get(part, set()) & {target, ".".join(steps[1:3])}:
                found.append(f"{where} imports {seen.target}: {part} may not see {target}")
        elif steps[0] in _kept_out(seen.module):
            found.append(f"{where} imports {seen.target}: kept out of {part}")
    return found


def _kept_out(module: str) -> set[str]:
    part = module.split(".")[0]
    return MUST_NOT_IMPORT.get(part, set()) - DOORS.get(module, set())


def test_the_package_keeps_the_rules():
    assert violations(PACKAGE) == []


def test_every_door_exists():
    assert DOORS.keys() <= dict(modules(PACKAGE)).keys()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    package = tmp_path / "plait"
    for part in ("frame", "storage/logs", "broker", "wire", "client/send", "testing"):
        (package / part).mkdir(parents=True)
    for room in [path for path in package.rglob("*") if path.is_dir()]:
        (room / "__init__.py").write_text("")
    for part in ("__init__", "errors", "limits"):
        (package / f"{part}.py").write_text("")
    return package


ALLOWED = [
    ("frame/view.py", "from plait.errors import FrameError"),
    ("frame/view.py", "from plait import limits"),
    ("frame/view.py", "from .header import Header"),
    ("frame/view.py", "import numpy as np"),
    ("storage/logs/log.py", "from plait.frame import FrameView"),
    ("storage/disk.py", "import os"),
    ("client/send/producer.py", "import asyncio"),
    ("wire/server.py", "import socket"),
    ("testing/broker.py", "from plait.broker import Broker"),
    ("broker/views.py", "from plait.wire.admin.subjects import GroupInfo"),
    ("__init__.py", "from plait.client import connect"),
]

FORBIDDEN = [
    ("frame/view.py", "from plait.storage import log"),
    ("frame/view.py", "import plait.storage.logs.log"),
    ("frame/view.py", "from plait import storage"),
    ("frame/view.py", "from .. import storage"),
    ("frame/view.py", "from ..storage.log import Log"),
    ("frame/__init__.py", "from ..storage import log"),
    ("frame/view.py", "import plait"),
    ("frame/view.py", "from plait import Message"),
    ("frame/view.py", "def f():\n    from plait.client import Client"),
    ("storage/logs/log.py", "import os.path"),
    ("storage/logs/log.py", "from plait.broker import dispatch"),
    ("broker/dispatch.py", "import asyncio"),
    ("broker/dispatch.py", "from plait.wire import messages"),
    ("broker/dispatch.py", "from plait.wire.link import Link"),
    ("broker/dispatch.py", "from time import monotonic"),
    ("broker/dispatch.py", "import socket as s"),
    ("broker/dispatch.py", "from random import random"),
    ("broker/dispatch.py", "if True:\n    import threading"),
    ("client/send/producer.py", "from plait.broker import dispatch"),
    ("client/send/producer.py", "from plait.storage import log"),
    ("client/send/producer.py", "from plait.testing import broker"),
    ("wire/server.py", "from plait.broker import dispatch"),
    ("client/send/producer.py", "import random"),
    ("wire/server.py", "from secrets import token_hex"),
    ("novelty.py", "import json"),
]


@pytest.mark.parametrize(("module", "source"), ALLOWED)
def test_an_allowed_import_is_no_violation(tree: Path, module: str, source: str):
    (tree / module).write_text(source)
    assert violations(tree) == []


@pytest.mark.parametrize(("module", "source"), FORBIDDEN)
def test_a_forbidden_import_is_found(tree: Path, module: str, source: str):
    (tree / module).write_text(source)
    assert len(violations(tree)) == 1
