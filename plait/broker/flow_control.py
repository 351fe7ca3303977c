"""Temporary refusal of sends: flow control while the log is busy, and the disk watermarks."""

from __future__ import annotations

from plait.broker.config import BrokerConfig
from plait.errors import FlowControl
from plait.limits import ServerLimits

SPACE_HELP = "delete subjects, shorten their retention (plait subject set), or add disk space"


def floor_of(total: int, config: BrokerConfig) -> int:
    """Bytes of the disk that the message log must leave free."""
    return max(config.disk_free_min, int((1 - config.disk_used_max) * total))


def low_space(free: int, total: int, config: BrokerConfig, lacking: int = 0) -> str:
    """Why the disk accepts no more messages; empty while it accepts them.

    ``lacking``: bytes that must be free before the message log can grow.
    """
    floor, watermark = config.disk_free_min, config.disk_used_max
    if free < floor or (free < lacking and floor == floor_of(total, config)):
        return f"{free >> 20} MiB of disk are free (minimum {floor >> 20} MiB); sends are refused; {SPACE_HELP}"
    used_share = 1 - free / total if total else 1.0
    if used_share > watermark or free < lacking:
        return f"the disk is {used_share:.0%} full (watermark {watermark:.0%}); sends are refused; {SPACE_HELP}"
    return ""


def refuse_when_busy(begun: float, oldest: float, now: float, limits: ServerLimits) -> None:
    """Raise ``FlowControl`` when the sync that began at ``begun`` takes too long, or a commit waited for it too long.

    ``oldest`` is the write time of the oldest commit that waits for a sync.
    """
    busy = now - begun
    if busy > limits.log_busy_seconds:
        raise FlowControl(f"the log has been busy for {busy:.1f} s; nothing was stored, send again later")
    # Only the time before the sync began matters here: the duration of the sync itself depends on the disk.
    if begun - oldest > limits.queue_head_seconds:
        raise FlowControl("the send queue is too long; nothing was stored, send again later")
