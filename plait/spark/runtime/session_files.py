"""The files that a Spark session starts from: a directory in the user's cache for each pair of Java and PySpark.

The directory has:

- a JAVA_HOME whose ``java`` drops arguments of Spark that this Java does not support: a trimmed JRE would refuse to
  start with them, and other JREs would warn at every start;
- a SPARK_HOME whose Python workers import PySpark from a directory and not from a zip file, so that they start in half
  the time;
- a log configuration that keeps warnings off the console;
- the class-data archives that make Java start faster.

The directory is built under a temporary name and renamed, so that it is complete if it exists, even if several
processes build it at the same time. It is never changed or removed while a session may use it, except for the archives,
which a running Java keeps open.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from plait.spark.runtime.java import ANSWER_SECONDS_MAX, Java

#: From this release on ``java.base`` has no ``sun.security.action``, and Java warns about the option that opens it.
_WITHOUT_SECURITY_ACTION = 25

_LAUNCHER = """\
#!/bin/sh
# Starts Java for Spark without the arguments named here.
for argument in "$@"; do
  shift
  case "$argument" in
    {dropped}) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {command} "$@"
"""

_LOGGING = """\
rootLogger.level = error
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
# Spark sets the root level of an interactive session to the level of this logger, and prints a line if it differs.
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
"""

#: The module with which Spark starts the Python workers of tasks. It is a module beside PySpark and not one of Plait,
#: since Plait's packages start threads and a daemon that forks must not. Spark starts the workers that plan a data
#: source with its own daemon, whatever the setting is.
DAEMON_MODULE = "plait_daemon"
_DAEMON = """\
\"\"\"Spark's daemon of Python workers. A worker exits without a traceback when Java closes its pipe: at the end of a
session Java closes all of them, and over Unix sockets each might print the traceback of a broken pipe.\"\"\"

import os

from pyspark import daemon

work = daemon.worker


def work_quietly(sock, authenticated):
    try:
        return work(sock, authenticated)
    except BrokenPipeError:
        os._exit(1)


if __name__ == "__main__":
    daemon.worker = work_quietly
    daemon.manager()
"""


@dataclass(frozen=True)
class Runtime:
    """The directory for one Java and one PySpark; it is complete if it exists."""

    directory: Path

    @property
    def java_home(self) -> Path:
        """The JAVA_HOME of Spark."""
        return self.directory / "java"

    @property
    def spark_home(self) -> Path:
        """The SPARK_HOME of a local session."""
        return self.directory / "spark"

    @property
    def logging(self) -> Path:
        """The log configuration: errors only, on standard error."""
        return self.directory / "log4j2.properties"

    @property
    def archive(self) -> Path:
        """Spark's class-data archive; it exists after `plait.spark.prepare`."""
        return self.directory / "spark.jsa"


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """The directory of all runtimes: ``$XDG_CACHE_HOME/plait``, or ``~/.cache/plait``."""
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "plait"


def runtime_for(java: Java, pyspark: Path, py4j: Path, version: str, cache: Path | None = None) -> Runtime:
    """The runtime for a Java and the PySpark whose packages are in those directories; built if it does not exist.

    If the cache is not writable, it is built in a temporary directory that is removed when this process exits.
    """
    # Changes when Java or PySpark is reinstalled (old archives would not match) or Plait writes other files.
    facts = [*map(str, (java.home, pyspark, py4j)), _LAUNCHER, _LOGGING, _DAEMON]
    facts += [str(path.stat().st_mtime_ns) for path in (java.program, pyspark / "jars")]
    fingerprint = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:12]
    name = f"spark-{version}-java-{java.version}-{fingerprint}"
    try:
        directory = (cache or cache_directory()) / name
        if not directory.is_dir():
            directory.parent.mkdir(parents=True, exist_ok=True)
            _build(directory, java, pyspark, py4j)
        with contextlib.suppress(PermissionError):
            os.utime(directory)
    except OSError:
        parent = Path(tempfile.mkdtemp(prefix="plait-"))
        atexit.register(shutil.rmtree, parent, ignore_errors=True)
        directory = parent / name
        _build(directory, java, pyspark, py4j)
    return Runtime(directory)


def _build(directory: Path, java: Java, pyspark: Path, py4j: Path) -> None:
    """Build it under a temporary name, then rename; if another process was faster, its directory is used."""
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        runtime = Runtime(aside)
        runtime.logging.write_text(_LOGGING)
        # ``python/lib/pyspark.zip``, which Spark puts on the path of its workers, is a directory: it imports faster.
        packages = runtime.spark_home / "python" / "lib" / "pyspark.zip"
        packages.mkdir(parents=True)
        (packages / "pyspark").symlink_to(pyspark)
        (packages / "py4j").symlink_to(py4j)
        (packages / f"{DAEMON_MODULE}.py").write_text(_DAEMON)
        for name in ("bin", "jars"):
            (runtime.spark_home / name).symlink_to(pyspark / name)
        archived = _archive_base_classes(java, aside / "base.jsa")
        _write_launcher(runtime.java_home, java, directory / "base.jsa" if archived else None)
        try:
            aside.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _archive_base_classes(java: Java, archive: Path) -> bool:
    """Archive Java's own classes if it has no such archive; Spark's archive is based on it."""
    if (java.home / "lib" / "server" / "classes.jsa").exists():
        return False
    command = [str(java.program), "-Xshare:dump", f"-XX:SharedArchiveFile={archive}", "-Xlog:disable"]
    try:
        dump = subprocess.run(command, capture_output=True, timeout=ANSWER_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        return False
    return dump.returncode == 0 and archive.exists()


def _write_launcher(home: Path, java: Java, base_archive: Path | None) -> None:
    dropped = ["--add-modules=jdk.incubator.vector"]
    if java.major >= _WITHOUT_SECURITY_ACTION:
        dropped.append("--add-opens=java.base/sun.security.action=ALL-UNNAMED")
    # Ignore an archive that does not match without a message: Java would print it on standard output.
    command = [str(java.program), "-Xlog:disable"]
    if base_archive is not None:
        command.append(f"-XX:SharedArchiveFile={base_archive}")
    launcher = home / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(_LAUNCHER.format(dropped=" | ".join(dropped), command=shlex.join(command)))
    launcher.chmod(0o755)
