"""A server process is set up for short pauses before it says that it is ready."""

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


def test_threads_wait_less_and_what_is_there_is_not_looked_through_again():
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=60)
