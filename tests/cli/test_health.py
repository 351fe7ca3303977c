"""`plait serve --http` answers a process monitor."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path


def test_serve_with_http_reports_health_and_stops_cleanly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "plait.cli", "serve", "--data", str(tmp_path / "data"), "--port", "0"]
    with subprocess.Popen([*command, "--http", "0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            ready = process.stdout.readline()
            assert ready.startswith("ready plait://127.0.0.1:")
            found = re.search(r"http=(\S+)", ready)
            assert found is not None
            with urllib.request.urlopen(found[1], timeout=60) as answer:
                assert json.load(answer)["status"] == "ready"
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
