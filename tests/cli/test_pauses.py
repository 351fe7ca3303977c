"""A server process is configured for short pauses before it is ready."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc, sys
from plait.cli.serving.interpreter_pauses import SWITCH_SECONDS, THRESHOLDS, keep_pauses_short
keep_pauses_short()
assert abs(sys.getswitchinterval() - SWITCH_SECONDS) < 1e-6
assert gc.get_threshold() == THRESHOLDS
assert gc.get_freeze_count() > 1000
assert gc.isenabled()
"""


def test_threads_switch_sooner_and_existing_objects_are_excluded_from_collection():
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=60)
