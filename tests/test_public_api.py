"""The public names and signatures of Plait match a snapshot.

A change of the snapshot is a change of the public API: add it to CHANGELOG.md, and update the snapshot with
``python -m tests.test_public_api --update``.
"""

from __future__ import annotations

import difflib
import enum
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

SNAPSHOT = Path(__file__).with_name("public_api.txt")
MODULES = ("plait", "plait.outbox", "plait.sync", "plait.testing")
UPDATE = "python -m tests.test_public_api --update"


def describe(module: ModuleType) -> Iterator[str]:
    """One line for each public name of the module and each public member of its classes."""
    for name in sorted(module.__all__):
        value = getattr(module, name)
        path = f"{module.__name__}.{name}"
        if inspect.isclass(value):
            yield f"class {path}({', '.join(_base_name(base) for base in value.__bases__)})"
            yield from (f"  {line}" for line in _members(value))
        elif callable(value):
            yield f"{_kind(value)} {path}{_signature(value)}"
        elif inspect.ismodule(value):
            yield f"module {path}"
        else:
            yield f"value {path}: {type(value).__name__}"


def _members(kind: type) -> Iterator[str]:
    if issubclass(kind, BaseException):
        for name in ("code", "retryable", "exit_code"):
            if hasattr(kind, name):
                yield f"{name} = {getattr(kind, name)!r}"
        return
    if issubclass(kind, enum.Enum):
        yield from (f"{member.name} = {member.value!r}" for member in kind)
        return
    if "__init__" in kind.__dict__ or "__struct_fields__" in kind.__dict__:
        yield f"new{_signature(kind)}"
    shown: set[str] = set()
    for owner in kind.__mro__:
        if not owner.__module__.startswith("plait"):
            continue
        fields = set(inspect.get_annotations(owner)) | set(owner.__dict__)
        shown |= {name for name in fields if not name.startswith("_")}
    shown |= {name for name in _PROTOCOLS if name in kind.__dict__}
    for name in sorted(shown):
        yield _member(kind, name)


#: Double-underscore methods that users call through syntax.
_PROTOCOLS = (
    "__aenter__", "__aexit__", "__aiter__", "__anext__", "__await__", "__call__", "__enter__", "__exit__",
    "__getitem__", "__iter__", "__len__", "__next__",
)  # fmt: skip


def _member(kind: type, name: str) -> str:
    value = inspect.getattr_static(kind, name, None)
    if isinstance(value, property):
        returns = inspect.signature(value.fget).return_annotation if value.fget else None
        return f"property {name}: {_annotation(returns)}"
    if isinstance(value, (classmethod, staticmethod)):
        return f"{type(value).__name__} {name}{_signature(getattr(kind, name))}"
    if inspect.isfunction(value):
        return f"{_kind(value)} {name}{_signature(value)}"
    annotations = {k: v for owner in reversed(kind.__mro__) for k, v in inspect.get_annotations(owner).items()}
    return f"field {name}: {_annotation(annotations[name])}" if name in annotations else f"attribute {name}"


def _kind(value: object) -> str:
    return "async def" if inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value) else "def"


def _annotation(value: object) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", str(value))


def _base_name(kind: type) -> str:
    public = kind.__module__ == "builtins" or kind.__module__.startswith("plait")
    return kind.__name__ if public else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def _signature(value: object) -> str:
    assert callable(value)
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    parameters = []
    for parameter in signature.parameters.values():
        if callable(parameter.default) and parameter.default is not parameter.empty:
            # A default whose ``repr`` has its address would differ in every run.
            parameter = parameter.replace(default=_Named(getattr(parameter.default, "__name__", "...")))
        parameters.append(parameter)
    return str(signature.replace(parameters=parameters)).replace("'", "")


class _Named:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


def snapshot() -> str:
    return "".join(f"{line}\n" for name in MODULES for line in describe(importlib.import_module(name)))


def test_the_public_interface_matches_the_snapshot():
    expected = SNAPSHOT.read_text().splitlines()
    actual = snapshot().splitlines()
    difference = list(difflib.unified_diff(expected, actual, SNAPSHOT.name, "now", lineterm="", n=0))
    assert not difference, f"the public interface changed; if this is intended, run {UPDATE}\n" + "\n".join(difference)


def test_every_public_name_is_documented():
    bare = []
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and not inspect.getdoc(value):
                bare.append(f"{module.__name__}.{name}")
    assert bare == []


def test_sync_has_the_same_client_names_as_the_asynchronous_package():
    client = importlib.import_module("plait")
    sync = importlib.import_module("plait.sync")
    for name in ("connect", "Admin", "Client", "Consumer", "Reader"):
        if name not in client.__all__:
            continue
        assert name in sync.__all__, f"plait.sync lacks {name}"
        theirs = {m for m in dir(getattr(client, name)) if not m.startswith("_")}
        ours = {m for m in dir(getattr(sync, name)) if not m.startswith("_")}
        assert theirs <= ours, f"plait.sync.{name} lacks {sorted(theirs - ours)}"


def test_a_changed_signature_changes_the_snapshot():
    module = ModuleType("sample")
    source = "__all__ = ['f']\ndef f(a: int, *, b: str = 'x') -> bytes: ...\n"
    exec(source, module.__dict__)
    before = list(describe(module))
    exec(source.replace("b: str", "b: bytes"), module.__dict__)
    assert before[0] == "def sample.f(a: int, *, b: str = x) -> bytes"
    assert list(describe(module)) != before


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit(f"usage: {UPDATE}")
    SNAPSHOT.write_text(snapshot())
    print(f"{SNAPSHOT.name}: {len(SNAPSHOT.read_text().splitlines())} lines")
