"""``help``, signatures and type hints work for every public name."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
import typing
from collections.abc import Iterator

import pytest

import plait
import plait.sync
import plait.testing


def public() -> Iterator[tuple[str, object]]:
    """Every public name."""
    for module in (plait, plait.sync, plait.testing):
        for name in module.__all__:
            yield f"{module.__name__}.{name}", getattr(module, name)


def members(kind: type) -> Iterator[tuple[str, object]]:
    for name, value in inspect.getmembers(kind):
        if not name.startswith("_"):
            yield name, value.fget if isinstance(value, property) else value


NAMES = {name: value for name, value in public() if not isinstance(value, str)}


@pytest.mark.parametrize("name", NAMES)
def test_help_works_on(name: str):
    assert pydoc.render_doc(NAMES[name])


def test_type_hints_of_every_public_name_resolve():
    unknown: list[str] = []
    for name, value in NAMES.items():
        found = [(name, value)]
        if inspect.isclass(value):
            found += [(f"{name}.{member}", each) for member, each in members(value) if inspect.isroutine(each)]
        for path, each in found:
            if not inspect.isclass(each) and not inspect.isfunction(each):
                continue
            try:
                typing.get_type_hints(each)
            except NameError as error:
                unknown.append(f"{path}: {error}")
    assert unknown == []


@pytest.mark.parametrize("name", ["Admin", "ArrowBatch", "Batch", "Client", "Consumer", "Reader"])
def test_a_blocking_method_has_the_signature_of_the_asynchronous_one(name: str):
    kind, blocking = getattr(plait, name), getattr(plait.sync, name)
    for member, method in inspect.getmembers(kind, inspect.isfunction):
        if not member.startswith("_"):
            twin = getattr(blocking, member)
            assert str(inspect.signature(twin)) == str(inspect.signature(method)), member
            assert not inspect.iscoroutinefunction(twin), member
            assert inspect.unwrap(twin) in (method, twin), f"{member} runs another method"
            if name == "Admin":
                assert inspect.unwrap(twin) is method, f"{member} is not made from its asynchronous form"
            assert inspect.getdoc(twin), member


def test_messages_and_receipts_have_type_hints_and_help():
    assert typing.get_type_hints(plait.Message)["key"] == str | None
    assert "deliver_at" in typing.get_type_hints(plait.Receipt)
    assert "send_time" in pydoc.plain(pydoc.render_doc(plait.Message))


def test_importing_plait_loads_no_heavy_module():
    """Checks modules instead of time: NumPy and Arrow are most of the import time."""
    program = (
        "import sys, plait\n"
        "heavy = {'numpy', 'pyarrow', 'asyncio', 'ssl', 'plait.client.client'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert set(plait.__all__) <= set(dir(plait))\n"
        "missing = [name for name in plait.__all__ if not hasattr(plait, name)]\n"
        "assert not missing, missing\n"
        "assert plait.sync.connect\n"
        "assert not hasattr(plait, 'nothing')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
