"""``plait`` as a user runs it: real processes, their output and their exit codes."""

from __future__ import annotations

import os
import pty
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

#: A command that takes this long fails the test.
SECONDS = 180.0


def environment(**more: str) -> dict[str, str]:
    """The environment without the variables that change a command's behaviour."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PLAIT_SERVER", "PLAIT_DEBUG")}
    return kept | more


def plait(*arguments: str, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "plait.cli", *arguments],
        input=stdin,
        capture_output=True,
        timeout=SECONDS,
        env=environment(**env),
    )


def answered(answer: bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command at a terminal, on which the user types an answer."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, answer)
        return subprocess.run(
            [sys.executable, "-m", "plait.cli", *arguments],
            stdin=theirs,
            capture_output=True,
            timeout=SECONDS,
            env=environment(),
        )
    finally:
        os.close(ours)
        os.close(theirs)


class Serving:
    """A server process that is ready."""

    def __init__(self, process: subprocess.Popen[bytes], ready: str) -> None:
        self.process = process
        self.ready = ready
        self.address = ready.split()[1]

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Send a signal. Returns (exit code, rest of standard output, standard error)."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, out.decode(), err.decode()


@contextmanager
def running(*arguments: str, files: tuple[int, int] | None = None, **env: str) -> Iterator[Serving]:
    """Run a serving command and stop it afterwards; ``files`` are its limits of open files."""
    process = subprocess.Popen(
        [sys.executable, "-m", "plait.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(**env),
        preexec_fn=None if files is None else partial(resource.setrlimit, resource.RLIMIT_NOFILE, files),
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        if not line.startswith("ready "):
            _, err = process.communicate(timeout=SECONDS)
            raise AssertionError(f"not ready: {line!r} {err.decode()}")
        yield Serving(process, line)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=SECONDS)


def serve(data: Path, *options: str, files: tuple[int, int] | None = None) -> AbstractContextManager[Serving]:
    """A node on a free port."""
    return running("serve", "--data", str(data), "--port", "0", "--segment-size", "32MiB", *options, files=files)


def meta(database: str, *options: str, port: int = 0) -> AbstractContextManager[Serving]:
    """A meta server."""
    return running("meta", "--database", database, "--port", str(port), *options)


def broker(group: str, metas: str, data: Path, *options: str) -> AbstractContextManager[Serving]:
    """A broker of a cluster."""
    return running(
        "broker", "--group", group, "--meta", metas, "--data", str(data), "--segment-size", "32MiB", *options
    )
