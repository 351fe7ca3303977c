"""The limit of open files, and the server limits that fit into it.

Connections, mapped consume logs and log segments share one limit. If connections could exhaust it, the next segment
could not be opened.
"""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import msgspec

from plait.broker.turn import MESSAGE_DIRECTORY
from plait.limits import FILES_PER_SEGMENT, FILES_RESERVE, ServerLimits
from plait.storage.logs.action_log import DIRECTORY as ACTION_DIRECTORY
from plait.storage.logs.retained_log import DIRECTORY as RETAINED_DIRECTORY
from plait.storage.logs.segment import SUFFIX


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard limit, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems refuse the hard limit that they report; then the soft limit stays.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def segment_count(data: Path) -> int:
    """The number of log segments in a data directory. A server keeps all of them open."""
    directories = (MESSAGE_DIRECTORY, RETAINED_DIRECTORY, ACTION_DIRECTORY)
    return sum(1 for directory in directories for _ in (data / directory).glob(f"*{SUFFIX}"))


def fit_limits(limits: ServerLimits, files: int, segments: int) -> ServerLimits:
    """The limits, with as many connections and open maps as fit into ``files``; at least one of each."""
    if files == resource.RLIM_INFINITY:
        return limits
    room = files - FILES_RESERVE - segments * FILES_PER_SEGMENT
    # Closed maps are opened again on demand; without any, every read of old messages would open a file.
    maps = min(limits.open_maps, max(room // 4, 1))
    return msgspec.structs.replace(limits, open_maps=maps, connections=min(limits.connections, max(room - maps, 1)))
