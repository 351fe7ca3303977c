"""How a broker is set up."""

from __future__ import annotations

from typing import Literal

import msgspec

from plait.limits import GIB, MIB, ServerLimits


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one broker; the defaults are those of ``plait serve``."""

    #: "async": acknowledge when written, flush every ``flush_seconds``; "sync": acknowledge when durable.
    flush: Literal["async", "sync"] = "async"
    flush_seconds: float = 0.5
    #: The name of the broker group, the second half of a partition's printed name.
    group: str = "g1"
    #: Subjects are created by the first send or consumer; otherwise only explicitly.
    auto_create: bool = True
    message_segment_size: int = 1 * GIB
    action_segment_size: int = 128 * MIB
    #: Dead letters, and retries that outlive their subject's retention.
    kept_segment_size: int = 64 * MIB
    #: A checkpoint is due after either of these.
    checkpoint_seconds: float = 60.0
    checkpoint_bytes: int = 256 * MIB
    #: A turn of the loop copies shards of a checkpoint until it has copied so many partitions: small shards are not
    #: worth a turn each.
    copy_partitions: int = 64
    #: What a subject that says nothing else keeps: three days, any size.
    retention_seconds: float | None = 72 * 3600.0
    retention_bytes: int | None = None
    #: Retention, dead letters that expired and idle groups are looked at so often.
    housekeeping_seconds: float = 60.0
    #: Retention deletes nothing of the message log and the action log that no archive has, whatever the limits say.
    archive_before_delete: bool = False
    #: How long dead letters are kept: 30 days; None: until they are purged.
    dead_seconds: float | None = 30 * 86400.0
    #: Sends are refused when the file system is fuller than this share...
    disk_used_max: float = 0.95
    #: ...or has less than this free.
    disk_free_min: int = 256 * MIB
    limits: ServerLimits = ServerLimits()
