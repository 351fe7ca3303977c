"""The process of a server: its limit of open files, and its short pauses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import plait
from plait.cli.serving.broker_process import fit_limits, segment_count
from plait.errors import LimitExceeded, PlaitError
from plait.limits import FILES_PER_SEGMENT, FILES_RESERVE, MIB, ServerLimits
from plait.wire import codec
from plait.wire import messages as m
from plait.wire.link import HEADER, HEADER_SIZE
from tests.cli.commands import plait as command
from tests.cli.commands import serve

WARNING = re.compile(r"too few files may be open: (\d+) connections are served instead of 10000, (\d+) consume logs")


async def refusal(reader: asyncio.StreamReader) -> PlaitError | None:
    """The error that the server sends to a new connection; None: the connection is served."""
    try:
        async with asyncio.timeout(0.5):
            size, kind, _, _, head_size = HEADER.unpack(await reader.readexactly(HEADER_SIZE))
            body = await reader.readexactly(size - HEADER_SIZE)
    except TimeoutError:
        return None
    message = codec.decode(kind, memoryview(body)[:head_size])
    assert isinstance(message, m.ErrorReply)
    return codec.error_of(message)


async def test_connections_leave_files_for_the_logs(tmp_path: Path):
    """More connections than fit are opened, and log segments are created while the others stay open."""
    allowed = FILES_RESERVE + 100
    with serve(tmp_path / "data", files=(allowed, allowed)) as node:
        host, port = node.address.removeprefix("plait://").split(":")
        async with plait.connect(node.address) as client, contextlib.AsyncExitStack() as stack:
            await client.send("orders", b"first")
            streams = []
            for _ in range(300):
                streams.append(await asyncio.open_connection(host, int(port)))
                stack.callback(streams[-1][1].close)
            answers = await asyncio.gather(*(refusal(reader) for reader, _ in streams))
            served = answers.count(None) + 1
            assert all(isinstance(answer, LimitExceeded) for answer in answers if answer is not None)
            refused = command("send", "orders", "x", "--server", node.address)
            assert refused.returncode == 6, refused.stderr
            assert b"(limit_exceeded)" in refused.stderr
            for number in range(40):
                assert (await client.send("orders", os.urandom(1 * MIB))).sequence == number + 1
        assert len(list((tmp_path / "data" / "message").iterdir())) > 1, "a segment was created meanwhile"
        code, _, err = node.stop()
    assert code == 0
    [(connections, maps)] = WARNING.findall(err)
    assert served == int(connections)
    assert int(connections) + int(maps) == 100
    assert "raise the hard limit (ulimit -Hn" in err


def test_the_soft_limit_is_raised_to_the_hard_one(tmp_path: Path):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serve(tmp_path / "data", files=(128, hard)) as node:
        assert psutil.Process(node.process.pid).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
        assert node.stop()[0] == 0


def test_limits_that_fit_stay_unchanged():
    wanted = ServerLimits(connections=700, open_maps=44)
    assert fit_limits(wanted, FILES_RESERVE + 744, 0) == wanted
    assert fit_limits(wanted, FILES_RESERVE + 744 + 5 * FILES_PER_SEGMENT, 5) == wanted
    assert fit_limits(wanted, resource.RLIM_INFINITY, 5) == wanted


@pytest.mark.parametrize("files", [1, 64, 256, 258, 300, 1024, 4096, 11_000])
@pytest.mark.parametrize("segments", [0, 10, 1000])
def test_the_limits_fit_into_any_number_of_files(files: int, segments: int):
    limits = fit_limits(ServerLimits(), files, segments)
    room = files - FILES_RESERVE - segments * FILES_PER_SEGMENT
    assert limits.connections + limits.open_maps <= max(room, 2)
    assert limits.connections >= 1
    assert limits.open_maps >= 1
    if room > 8:
        assert limits.connections > 2 * limits.open_maps, "maps can be opened again, connections cannot"


def test_existing_segments_are_counted(tmp_path: Path):
    assert segment_count(tmp_path / "data") == 0
    for name in ("message/00.log", "message/01.log", "action/00.log", "consume/00000001.0", "LOCK"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert segment_count(tmp_path) == 3


CODE = """
import gc, sys
from plait.cli.serving.foreground import SWITCH_SECONDS, THRESHOLDS, keep_pauses_short
keep_pauses_short()
assert abs(sys.getswitchinterval() - SWITCH_SECONDS) < 1e-6
assert gc.get_threshold() == THRESHOLDS
assert gc.get_freeze_count() > 1000
assert gc.isenabled()
"""


def test_threads_switch_sooner_and_existing_objects_are_excluded_from_collection():
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=60)
