"""An ``App`` in its own process: signals drain it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import plait.sync
from plait.testing import BlockingBroker

PROGRAM = """
import asyncio, logging, sys
import plait

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
app = plait.App(sys.argv[1], group="g", limits=plait.ClientLimits(drain_seconds=float(sys.argv[3])))
kind = sys.argv[2]

def say(text):
    print(text, flush=True)

if kind == "def":
    @app.subscriber("s")
    def handle(body: bytes) -> None:
        say(f"handling {body.decode()}")
        sys.stdin.readline()
        say(f"handled {body.decode()}")
else:
    @app.subscriber("s")
    async def handle(body: bytes) -> None:
        say(f"handling {body.decode()}")
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        say(f"handled {body.decode()}")

@app.on_shutdown
def bye() -> None:
    say(f"bye on {type(asyncio.get_running_loop()).__module__}")

app.run_forever()
say("done")
"""


@contextmanager
def service(address: str, kind: str, drain_seconds: float = 30) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "error", "-c", PROGRAM, address, kind, str(drain_seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """Lines of output up to the first one that contains ``text``."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.strip())
        if text in line:
            return lines
    raise AssertionError(f"{text!r} did not come after {lines}")


def release(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def left(address: str) -> list[bytes]:
    """The bodies of the unfinished messages of the group."""
    with plait.sync.connect(address) as client, client.consumer("s", group="g") as consumer:
        return [message.body for message in consumer.fetch(100, wait=0.2)]


@pytest.mark.parametrize("kind", ["async def", "def"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_finishes_running_calls_and_returns_the_other_messages(
    plait_broker: BlockingBroker, kind: str, number: signal.Signals
) -> None:
    with plait.sync.connect(plait_broker.address) as client:
        client.send_many("s", [b"0", b"1", b"2"])
    with service(plait_broker.address, kind) as process:
        read_until(process, "handling 0")
        process.send_signal(number)
        read_until(process, "draining")
        release(process)
        rest = read_until(process, "done")
        assert process.wait(20) == 0
    assert rest == ["handled 0", "bye on uvloop", "done"]
    assert left(plait_broker.address) == [b"1", b"2"]


def test_the_message_of_a_handler_that_exceeds_the_drain_time_is_returned(plait_broker: BlockingBroker) -> None:
    with plait.sync.connect(plait_broker.address) as client:
        client.send("s", b"0")
    with service(plait_broker.address, "def", drain_seconds=0.05) as process:
        read_until(process, "handling 0")
        process.send_signal(signal.SIGTERM)
        lines = read_until(process, "done")
        assert "1 handlers did not finish; their messages are returned to the group" in lines
        # The thread cannot be stopped, and the process does not wait for it.
        assert process.wait(20) == 0
        assert left(plait_broker.address) == [b"0"]


def test_a_second_signal_does_not_wait(plait_broker: BlockingBroker) -> None:
    with plait.sync.connect(plait_broker.address) as client:
        client.send("s", b"0")
    with service(plait_broker.address, "async def") as process:
        read_until(process, "handling 0")
        process.send_signal(signal.SIGTERM)
        read_until(process, "draining")
        process.send_signal(signal.SIGTERM)
        read_until(process, "did not finish")
        read_until(process, "bye")
        release(process)
        assert process.wait(20) == 0
    assert left(plait_broker.address) == [b"0"]


SILENT = """
import sys
import plait

app = plait.App(sys.argv[1], group="billing", client_id="me")

@app.subscriber("s")
def handle(body: bytes) -> None:
    app.stop()

app.run_forever()
"""


def test_an_app_without_logging_setup_prints_that_it_is_ready(plait_broker: BlockingBroker) -> None:
    with plait.sync.connect(plait_broker.address) as client:
        client.send("s", b"0")
    command = [sys.executable, "-W", "error", "-c", SILENT, plait_broker.address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "")
    [ready] = [line for line in ended.stderr.splitlines() if "ready" in line]
    assert ready.endswith("INFO plait.app: ready: handle handles s (group billing), as client me")
    assert "draining" in ended.stderr
