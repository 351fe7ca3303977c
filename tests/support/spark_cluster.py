"""A real standalone Spark cluster on loopback: a master and two workers, from the installed PySpark."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pyspark

from plait.spark.runtime.session import find_runtime

WORKERS = 2
#: Several Java processes start at the same time, perhaps on a busy machine.
START_SECONDS = 120.0
LOOK_SECONDS = 0.2
_LOOPBACK = "127.0.0.1"


@contextmanager
def spark_cluster(directory: Path) -> Iterator[str]:
    """Yields the master's address when both workers have registered. The cluster ends with the block."""
    port, page = _free_port(), _free_port()
    master = f"spark://{_LOOPBACK}:{port}"
    with ExitStack() as stack:
        options = ["--host", _LOOPBACK, "--port", str(port), "--webui-port", str(page)]
        processes = [_start(stack, directory, "master", "master.Master", *options)]
        for number in range(WORKERS):
            work = directory / f"work-{number}"
            limits = ["--host", _LOOPBACK, "--cores", "1", "--memory", "1g", "--webui-port", "0"]
            options = [*limits, "--work-dir", str(work), master]
            processes.append(_start(stack, directory, f"worker-{number}", "worker.Worker", *options))
        _wait(processes, f"http://{_LOOPBACK}:{page}/json/", directory)
        yield master


def _start(stack: ExitStack, directory: Path, name: str, role: str, *options: str) -> subprocess.Popen[bytes]:
    home = Path(pyspark.__file__).parent
    environ = os.environ | {
        "JAVA_HOME": str(find_runtime().java_home),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": _LOOPBACK,
        "SPARK_NO_DAEMONIZE": "1",
        "PYSPARK_PYTHON": sys.executable,
    }
    log = stack.enter_context((directory / f"{name}.log").open("wb"))
    command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{role}", *options]
    process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], page: str, directory: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        if any(process.poll() is not None for process in processes) or time.monotonic() > deadline:
            logs = "".join(path.read_text(errors="replace")[-2000:] for path in sorted(directory.glob("*.log")))
            raise RuntimeError(f"the Spark cluster did not start: {logs}")
        try:
            with urllib.request.urlopen(page, timeout=5) as answer:
                state = json.load(answer)
        except (OSError, ValueError):
            state = {}
        if state.get("aliveworkers") == WORKERS:
            return
        with suppress(subprocess.TimeoutExpired):
            processes[0].wait(LOOK_SECONDS)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((_LOOPBACK, 0))
        return int(listener.getsockname()[1])
