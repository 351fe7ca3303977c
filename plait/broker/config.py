"""The configuration of a broker."""

from __future__ import annotations

from typing import Literal

import msgspec

from plait.limits import GIB, MIB, ServerLimits


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one broker; the defaults are those of ``plait serve``."""

    #: "async": acknowledge when written, sync every ``flush_seconds``; "sync": acknowledge when durable.
    flush: Literal["async", "sync"] = "async"
    flush_seconds: float = 0.5
    #: The name of the broker group: the part after ``@`` in a partition's printed name.
    group: str = "g1"
    #: True: the first send to a subject, or its first consumer, creates it. False: only an explicit request does.
    auto_create: bool = True
    message_segment_size: int = 1 * GIB
    action_segment_size: int = 128 * MIB
    #: Of the retained log: dead letters, and messages that a group needs after retention removed them.
    retained_segment_size: int = 64 * MIB
    #: A checkpoint is due after this time or this many bytes, whichever comes first.
    checkpoint_seconds: float = 60.0
    checkpoint_bytes: int = 256 * MIB
    #: One loop turn copies checkpoint shards until it has copied this many partitions: a small shard is not worth a
    #: turn of its own.
    copy_partitions: int = 64
    #: Retention of a subject without settings of its own: three days, any size.
    retention_seconds: float | None = 72 * 3600.0
    retention_bytes: int | None = None
    #: The period between two runs of retention, of dead letter expiry and of the removal of idle groups.
    housekeeping_seconds: float = 60.0
    #: Retention deletes no part of the first-hand logs before an archive has it, whatever the limits are.
    archive_before_delete: bool = False
    #: How long dead letters are stored: 30 days; None: until they are purged.
    dead_seconds: float | None = 30 * 86400.0
    #: Sends are refused when more than this share of the file system is used...
    disk_used_max: float = 0.95
    #: ...or less than this is free.
    disk_free_min: int = 256 * MIB
    limits: ServerLimits = ServerLimits()
