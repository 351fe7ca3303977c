"""Starts a Spark session for Plait: finds Java, starts quickly, logs errors only, and registers ``format("plait")``.

The master is local by default. The caller's settings override Plait's defaults. The environment variables that Spark
is started with are restored afterwards.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from plait.errors import InvalidArgument
from plait.spark.runtime.java import Java, SparkUnavailable, find_java
from plait.spark.runtime.session_files import DAEMON_MODULE, Runtime, runtime_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The first version with admission control of streaming readers and Arrow batches of data sources.
PYSPARK_MIN = (4, 3)
DEFAULT_MASTER = "local[*]"
#: The buffer between Java and a Python worker; Spark's default of 64 KiB is less than one Arrow batch.
PYTHON_BUFFER_SIZE = 1 << 20
#: How long a Python worker keeps memory that it has freed.
WORKER_MEMORY_MILLISECONDS = 5_000
#: Tasks of a shuffle for each local thread: few, since a small task costs more than its rows; more than one, so that
#: threads can share an uneven load.
SHUFFLE_TASKS_PER_THREAD = 2

#: The path of a Unix socket is limited to 103 bytes on some systems, and its file name has 42. Below a longer directory
#: the session uses TCP.
SOCKET_DIRECTORY_MAX = 60

_SOCKETS = "spark.python.unix.domain.socket.dir"
_PACKAGES = ("pyspark", "pandas", "pyarrow")
_LOCAL = re.compile(r"local(?:\[(?P<threads>\*|\d+)(?:\s*,\s*\d+)?\])?")

#: For every master.
_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # A fifth less CPU than TCP over loopback for rows that come from Python.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.buffer.size": str(PYTHON_BUFFER_SIZE),
    # By default Arrow's allocator returns memory after 10 ms, and a worker that writes Parquet spends a third of its
    # time on getting it back.
    "spark.executorEnv.MIMALLOC_PURGE_DELAY": str(WORKER_MEMORY_MILLISECONDS),
    # A virtual machine returns huge pages to its host: with them archiving takes 5 % longer.
    "spark.executorEnv.MIMALLOC_ALLOW_THP": "0",
}


def session(
    app_name: str = "plait",
    *,
    master: str | None = None,
    config: Mapping[str, object] | None = None,
) -> SparkSession:
    """A Spark session with ``format("plait")`` registered: the running session if there is one, else a new one.

    `master` is any Spark master (default: ``spark.master`` of `config`, else all cores of this machine); `config` has
    Spark settings, which override Plait's. On a running session the settings that can still change are applied;
    ``InvalidArgument`` names a setting, such as another master, that cannot. ``SparkUnavailable`` says what is missing
    where Spark cannot start.
    """
    check_packages()
    items = (config or {}).items()
    given = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in items}
    if master is not None:
        given["spark.master"] = master
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    running = None
    with contextlib.suppress(PySparkRuntimeError):
        running = SparkSession.active()
    spark = _start(app_name, given) if running is None else _adopt(running, given)
    register(spark)
    return spark


def register(spark: SparkSession) -> None:
    """Register ``format("plait")`` with a session; `session` does this for the sessions it starts.

    Also turns on filter pushdown for Python sources, which Spark leaves off by default and the source uses.
    """
    from plait.spark.source.data_source import PlaitDataSource

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(PlaitDataSource)


def find_runtime(java: Java | None = None) -> Runtime:
    """The runtime directory of sessions of this process; built if it does not exist."""
    import pyspark

    return runtime_for(java or find_java(), _package("pyspark"), _package("py4j"), pyspark.__version__)


def check_packages() -> None:
    """Raise ``SparkUnavailable`` unless the packages of ``plait[spark]`` are installed."""
    if os.name != "posix":
        raise SparkUnavailable(f"plait.spark needs Linux or macOS; this is {sys.platform}")
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise SparkUnavailable(
            f'{" and ".join(missing)} cannot be imported: pip install "plait[spark]"', missing=missing
        )
    import pyspark

    version = pyspark.__version__
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < PYSPARK_MIN:
        needed = ".".join(map(str, PYSPARK_MIN))
        raise SparkUnavailable(
            f'pyspark {version} is too old, Plait needs {needed} or newer: pip install "plait[spark]"'
        )


def _package(name: str) -> Path:
    """The directory that a package is imported from."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SparkUnavailable(f'{name} cannot be imported: pip install "plait[spark]"')
    return Path(spec.origin).parent


def _adopt(running: SparkSession, given: Mapping[str, str]) -> SparkSession:
    """Apply settings to a running session."""
    for key, value in given.items():
        if running.conf.get(key, None) == value:
            continue
        if not running.conf.isModifiable(key):
            raise InvalidArgument(
                f"{key} is {running.conf.get(key, None)} in the running session and cannot become "
                f"{value}: stop() that session first, or leave the setting out",
                key=key,
                value=value,
            )
        running.conf.set(key, value)
    return running


def _start(app_name: str, given: Mapping[str, str]) -> SparkSession:
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    settings = _DEFAULTS | {"spark.app.name": app_name}
    # Under spark-submit, and after an earlier session of this process, Java runs already; spark-submit also sets the
    # master.
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if not submitted:
        settings["spark.master"] = DEFAULT_MASTER
    if len(os.fsencode(given.get(_SOCKETS, tempfile.gettempdir()))) > SOCKET_DIRECTORY_MAX:
        settings["spark.python.unix.domain.socket.enabled"] = "false"
    threads = _local_threads((settings | dict(given)).get("spark.master"))
    local = threads is not None
    if threads is not None:
        settings["spark.sql.shuffle.partitions"] = str(SHUFFLE_TASKS_PER_THREAD * threads)
    # Local workers run the Python of the caller; workers of a cluster run ``PYSPARK_PYTHON`` if it is set.
    named = None if local else os.environ.get("PYSPARK_PYTHON")
    environment = {"PYSPARK_PYTHON": named or sys.executable}
    java_home = None
    if not submitted:
        runtime = find_runtime()
        java_home = runtime.java_home
        # The directory where the user may have ``spark-defaults.conf`` and a log configuration.
        home = os.environ.get("SPARK_HOME") or _package("pyspark")
        configuration = Path(os.environ.get("SPARK_CONF_DIR") or Path(home, "conf"))
        environment["JAVA_HOME"] = str(java_home)
        if local:
            environment["SPARK_LOCAL_IP"] = os.environ.get("SPARK_LOCAL_IP", "127.0.0.1")
        if local and "SPARK_HOME" not in os.environ:
            environment |= {"SPARK_HOME": str(runtime.spark_home), "SPARK_CONF_DIR": str(configuration)}
            settings["spark.python.daemon.module"] = DAEMON_MODULE
        options = [f"-XX:SharedArchiveFile={runtime.archive}"] if runtime.archive.exists() else []
        if not any(configuration.glob("log4j2*")):
            options.append(f"-Dlog4j2.configurationFile={runtime.logging.as_uri()}")
        settings["spark.driver.defaultJavaOptions"] = shlex.join(options)
    builder = SparkSession.builder.config(map={**settings, **given})
    try:
        with _environment(environment):
            spark = builder.getOrCreate()
    except PySparkRuntimeError as error:
        if error.getCondition() != "JAVA_GATEWAY_EXITED":
            raise
        raise SparkUnavailable(
            f"Java exited before Spark had started; its output is above. "
            f"Started with JAVA_HOME={java_home} and the settings {given or 'of Plait alone'}"
        ) from error
    atexit.register(_stop, spark, os.getpid())
    return spark


def _stop(spark: SparkSession, process: int) -> None:
    """Stop a session at exit, since a session that is not stopped leaves its sockets behind. A forked child does
    nothing: the session belongs to its parent."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    if os.getpid() == process:
        with contextlib.suppress(Py4JError, OSError):
            spark.stop()


def _local_threads(master: str | None) -> int | None:
    """The number of threads of a local master; None for any other master."""
    match = _LOCAL.fullmatch(master or "")
    if match is None:
        return None
    threads = match["threads"]
    return (os.cpu_count() or 1) if threads == "*" else int(threads or 1)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while Spark starts and restore them afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
