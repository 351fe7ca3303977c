"""``plait bench`` and ``plait doctor`` as processes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli import data_directory
from tests.cli.commands import Serving, plait
from tests.cli.conftest import Here
from tests.cli.data_directory import fingerprint, flip, frames


def test_a_bench_measures_and_deletes_its_subjects(node: Serving, here: Here):
    before = here("subject", "list", "-o", "json").stdout
    options = ("--count", "5000", "--size", "64", "--keys", "10", "--batch", "500")
    result = plait("bench", *options, "-o", "json", "--server", node.address)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert {key: report[key] for key in ("count", "size", "keys", "batch")} == {
        "count": 5000,
        "size": 64,
        "keys": 10,
        "batch": 500,
    }
    figures = {figure["name"]: figure for figure in report["figures"]}
    assert figures["send_many"]["count"] == figures["fetch_arrow + ack"]["count"] == 5000
    assert all(figure["messages_per_second"] > 0 for figure in figures.values())
    latency = figures["one at a time, send to fetch"]
    assert 0 < latency["p50"] <= latency["p99"]
    assert here("subject", "list", "-o", "json").stdout == before


def test_a_bench_on_an_embedded_node_prints_a_table():
    result = plait("bench", "--embedded", "--count", "1000")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.decode().splitlines()
    assert any(line.split()[:2] == ["send_many", "1,000"] for line in lines)


async def test_doctor_names_seeded_damage_and_writes_nothing(tmp_path: Path):
    data = tmp_path / "data"
    await data_directory.make(data)
    before = fingerprint(data)
    healthy = plait("doctor", str(data))
    assert healthy.returncode == 0, healthy.stderr
    assert healthy.stdout.endswith(b"\nhealthy\n")
    assert fingerprint(data) == before

    file = sorted((data / "message").iterdir())[1]
    position, frame = next((p, f) for p, f in frames(file)[1:] if f.partition)
    flip(file, position + frame.size // 2)
    before = fingerprint(data)
    damaged = plait("doctor", str(data))
    assert damaged.returncode == 8, damaged.stderr
    text = damaged.stdout.decode()
    assert f"damaged: message log, message/{file.name}, byte {position:,}" in text
    assert text.endswith("\ndamaged: 1 finding\n")
    report = json.loads(plait("doctor", str(data), "-o", "json").stdout)
    assert report["healthy"] is False
    assert [finding["offset"] for finding in report["findings"]] == [position]
    assert report["missing_messages"] == frame.count
    assert fingerprint(data) == before


def test_doctor_checks_the_directory_of_a_running_node(node: Serving, here: Here, subject: str):
    assert here("send", subject, "a").returncode == 0
    data = node.ready.split(" data=")[1].split(" flush=")[0]
    report = json.loads(plait("doctor", data, "-o", "json").stdout)
    assert (report["in_use"], report["healthy"]) == (True, True)
    assert report["message_log"]["rows"] >= 1
    assert here("subject", "list").returncode == 0
