"""The command line: ``plait serve | meta | broker | send | tail | subject | group | dlq | schedule | cluster | …``.

Commands import what they need when they run, so that ``plait --help`` answers at once. What goes wrong on purpose ends
in one line on standard error and the error's stable exit code (docs/errors.md).
"""

from __future__ import annotations

import sys


def main() -> None:
    """The ``plait`` command."""
    from plait.cli.entry import run

    sys.exit(run(sys.argv[1:]))
