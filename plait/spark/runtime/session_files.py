"""What a Spark session starts from: a directory in the user's cache, one for each pair of Java and PySpark.

It holds a JAVA_HOME whose ``java`` leaves out arguments of Spark that this Java has no use for (a trimmed JRE
would refuse to start with them, others would warn at every start); a SPARK_HOME whose Python workers import
PySpark from its directory instead of from a zip file, which halves their start; a log configuration that
keeps warnings off the console; and the class-data archives that make Java start faster.

The directory is built aside and renamed, so that it is complete whenever it is there, whoever else builds it
at the same time. It is never changed or removed while a session may run from it; only archives, which a
running Java keeps open, are.
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

#: From this release on ``sun.security.action`` is gone from ``java.base``, and opening it is warned about.
_WITHOUT_SECURITY_ACTION = 25

_LAUNCHER = """\
#!/bin/sh
# Java as Spark is to start it: without the arguments named here.
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
# Spark lowers the level of an interactive session to this logger's: the same one, so that nothing is said.
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
"""

#: What Spark is told to start the Python workers of tasks with; a module beside PySpark, since it is forked
#: before a worker imports anything that starts threads, as Plait's own packages do. The workers that plan a
#: data source are out of its reach: Spark starts those with its own daemon, whatever it is told.
DAEMON_MODULE = "plait_daemon"
_DAEMON = """\
\"\"\"Spark's daemon of Python workers. A worker that Java has hung up on ends without a word: at the end of a
session that is all of them, and over Unix sockets each might print the traceback of a broken pipe.\"\"\"

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
    """The directory for one Java and one PySpark; complete as long as it exists."""

    directory: Path

    @property
    def java_home(self) -> Path:
        """What Spark is given as JAVA_HOME."""
        return self.directory / "java"

    @property
    def spark_home(self) -> Path:
        """What a local session is given as SPARK_HOME."""
        return self.directory / "spark"

    @property
    def logging(self) -> Path:
        """Log configuration: errors alone, on standard error."""
        return self.directory / "log4j2.properties"

    @property
    def archive(self) -> Path:
        """Spark's class-data archive; there after `plait.spark.prepare`."""
        return self.directory / "spark.jsa"


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where runtimes are kept: ``$XDG_CACHE_HOME/plait``, or ``~/.cache/plait``."""
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "plait"


def runtime_for(java: Java, pyspark: Path, py4j: Path, version: str, cache: Path | None = None) -> Runtime:
    """The runtime for a Java and the PySpark whose packages are in those directories, built if need be.

    Where the cache cannot be written it is built in a temporary directory that goes with this process.
    """
    name = f"spark-{version}-java-{java.version}-{_fingerprint(java, pyspark, py4j)}"
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


def _fingerprint(java: Java, pyspark: Path, py4j: Path) -> str:
    """Changes when Java or PySpark is installed anew (old archives would not fit) or Plait writes other files."""
    facts = [str(path) for path in (java.home, pyspark, py4j)]
    facts += [_LAUNCHER, _LOGGING, _DAEMON]
    facts += [str(path.stat().st_mtime_ns) for path in (java.program, pyspark / "jars")]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:12]


def _build(directory: Path, java: Java, pyspark: Path, py4j: Path) -> None:
    """Build it aside, then rename; if another process was first, its is as good as ours."""
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        runtime = Runtime(aside)
        runtime.logging.write_text(_LOGGING)
        _link_spark(runtime.spark_home, pyspark, py4j)
        archived = _archive_base_classes(java, aside / "base.jsa")
        _write_launcher(runtime.java_home, java, directory / "base.jsa" if archived else None)
        try:
            aside.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _link_spark(home: Path, pyspark: Path, py4j: Path) -> None:
    """Spark puts ``python/lib/pyspark.zip`` on its workers' path: a directory of that name imports faster."""
    packages = home / "python" / "lib" / "pyspark.zip"
    packages.mkdir(parents=True)
    (packages / "pyspark").symlink_to(pyspark)
    (packages / "py4j").symlink_to(py4j)
    (packages / f"{DAEMON_MODULE}.py").write_text(_DAEMON)
    for name in ("bin", "jars"):
        (home / name).symlink_to(pyspark / name)


def _archive_base_classes(java: Java, archive: Path) -> bool:
    """Archive Java's own classes where it came without such an archive; Spark's builds upon it."""
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
    # An archive that does not fit is to be ignored without a word: Java would say so on standard output.
    command = [str(java.program), "-Xlog:disable"]
    if base_archive is not None:
        command.append(f"-XX:SharedArchiveFile={base_archive}")
    launcher = home / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(_LAUNCHER.format(dropped=" | ".join(dropped), command=shlex.join(command)))
    launcher.chmod(0o755)
