"""The leak check finds real namespaces and mounts, and distinguishes two runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import leaks
from tests.support.require import require_mounts, require_namespaces, require_program


@pytest.fixture
def token() -> str:
    return leaks.mark_run()


def test_a_network_namespace_left_behind_is_found(token: str):
    require_namespaces()
    ip = require_program("ip", package="iproute2")
    before = leaks.observe(token)
    name = leaks.run_name("leak")
    subprocess.run([ip, "netns", "add", name], check=True)
    try:
        found = leaks.observe(token).beyond(before)
    finally:
        subprocess.run([ip, "netns", "delete", name], check=True)
    assert f"namespace {name}" in found
    assert leaks.observe(token).beyond(before) == []


def test_a_mount_left_behind_is_found(token: str, tmp_path: Path):
    require_mounts()
    before = leaks.observe(token)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], check=True)
    try:
        found = leaks.observe(token).beyond(before)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert found == [f"mount {tmp_path}"]
    assert leaks.observe(token).beyond(before) == []


def test_namespaces_and_mounts_from_before_the_run_are_no_leak():
    before = leaks.Traces(mounts=frozenset({"/a"}), namespaces=frozenset({"blue"}))
    after = leaks.Traces(mounts=frozenset({"/a", "/b"}), namespaces=frozenset({"blue", "red"}))
    assert after.beyond(before) == ["namespace red", "mount /b"]
    assert before.beyond(after) == []


def test_names_of_another_live_run_are_not_ours():
    assert leaks._of_another_run(f"plait-{os.getppid()}-net")
    assert leaks._of_another_run(f"somewhere/plait-{os.getppid()}-net/disk")
    assert not leaks._of_another_run(leaks.run_name("net"))
    assert not leaks._of_another_run("plait-2147483646-net")
    assert not leaks._of_another_run("net")
