"""The command line: ``plait serve | meta | broker | send | tail | subject | group | dlq | schedule | cluster | …``.

``entry`` has the tree of commands, ``commands`` those that talk to a node or read files, ``serving`` those that run a
server. Commands are imported when they run, so that ``plait --help`` is fast. A ``PlaitError`` is printed as one line
on standard error and ends the process with the exit code of the error (docs/errors.md). May import every package of
plait; no other package imports this one.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The ``plait`` command."""
    from plait.cli.entry import run

    sys.exit(run(sys.argv[1:]))
