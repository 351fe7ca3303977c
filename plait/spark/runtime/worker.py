"""Prepares a Python worker of Spark: makes many short tasks cheap, and suppresses the traceback at its end.

Spark forks a worker from a daemon and reuses it for many tasks. In any other process nothing is changed.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any, Final

from plait.memory import keep_buffers

#: The module of the daemon that Spark's workers are forked from.
_DAEMON: Final = "pyspark.daemon"

#: A fork inherits this flag together with the frozen objects. ``gc.get_freeze_count`` would count all objects instead.
_prepared = False


def prepare_worker() -> None:
    """Prepare this process once if it is a worker of Spark."""
    main = sys.modules["__main__"]
    started_as = getattr(main, "__spec__", None)
    is_daemon = started_as is not None and started_as.name == _DAEMON
    if not is_daemon and _DAEMON not in sys.modules:
        return
    global _prepared
    if _prepared:
        return
    _prepared = True
    # A worker runs a full garbage collection after every task. Scanning the objects of Spark, Arrow and Plait takes
    # 20 to 40 ms each time, a third of an average task, and none of them is ever garbage: exclude them.
    gc.collect()
    gc.freeze()
    # Data from brokers arrives in buffers of 1 MiB: mapping new memory for each costs a third of the read time.
    keep_buffers()
    if is_daemon:
        _end_quietly(main)


def _end_quietly(daemon: Any) -> None:
    """Exit without a traceback when Java closes the pipe, as it does after a minute without work."""
    work = daemon.worker

    def work_quietly(*arguments: Any) -> Any:
        try:
            return work(*arguments)
        except BrokenPipeError:
            os._exit(1)

    daemon.worker = work_quietly
