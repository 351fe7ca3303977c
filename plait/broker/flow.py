"""When sends are refused for a while: flow control and the watermarks of the disk."""

from __future__ import annotations

from plait.broker.config import BrokerConfig
from plait.errors import FlowControl
from plait.limits import ServerLimits


def low_space(free: int, total: int, config: BrokerConfig) -> str:
    """Why the disk takes no more messages; empty: it does."""
    used_share = 1 - free / total if total else 1.0
    floor, watermark = config.disk_free_min, config.disk_used_max
    if free < floor:
        return f"{free >> 20} MiB of disk are free (floor {floor >> 20} MiB); sends are refused"
    if used_share > watermark:
        return f"the disk is {used_share:.0%} full (watermark {watermark:.0%}); sends are refused"
    return ""


def refuse_when_busy(begun: float, oldest: float, now: float, limits: ServerLimits) -> None:
    """``FlowControl`` while the sync that began at ``begun`` takes too long, or what waits for it has too long already.

    ``oldest`` is when the first of those that wait was written.
    """
    busy = now - begun
    if busy > limits.log_busy_seconds:
        raise FlowControl(f"the log has been busy for {busy:.1f} s; nothing was stored, send again later")
    # How long it waited before its sync began: the time a sync takes is the disk's.
    if begun - oldest > limits.queue_head_seconds:
        raise FlowControl("the send queue is too long; nothing was stored, send again later")
