"""How many files the process may have open, and what a server can serve with them.

Connections, mapped consume logs and log segments all take from one number. If connections could use it up, the next
segment could not be opened.
"""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import msgspec

from plait.broker.broker import MESSAGE_DIRECTORY
from plait.limits import FILES_PER_SEGMENT, FILES_RESERVE, ServerLimits
from plait.storage.logs.action_log import DIRECTORY as ACTION_DIRECTORY
from plait.storage.logs.log import SUFFIX
from plait.storage.logs.retained_log import DIRECTORY as KEPT_DIRECTORY


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one; the limit from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # A system may not let everybody have what it names; then the limit is what it was.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def segment_count(data: Path) -> int:
    """Segments of the logs in a data directory, which a server keeps open."""
    directories = (MESSAGE_DIRECTORY, KEPT_DIRECTORY, ACTION_DIRECTORY)
    return sum(1 for directory in directories for _ in (data / directory).glob(f"*{SUFFIX}"))


def fit(limits: ServerLimits, files: int, segments: int) -> ServerLimits:
    """The limits, with as many connections and open maps as fit into ``files``; at least one of each."""
    if files == resource.RLIM_INFINITY:
        return limits
    room = files - FILES_RESERVE - segments * FILES_PER_SEGMENT
    # Maps are opened again when they are missed, but without any every read of old messages opens a file.
    maps = min(limits.open_maps, max(room // 4, 1))
    return msgspec.structs.replace(limits, open_maps=maps, connections=min(limits.connections, max(room - maps, 1)))
