"""What a check-up tells: facts about the parts, and findings that say what is wrong, how bad it is and what to do."""

from __future__ import annotations

from typing import Literal

import msgspec

#: "note": as it should be after what happened, nothing to do. "damaged": bytes are not what Plait wrote.
Severity = Literal["note", "damaged"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something to know. ``offset`` is the position in the file, where there is one."""

    severity: Severity
    part: str
    file: str
    offset: int | None = None
    size: int | None = None
    what: str
    harm: str
    advice: str


class CheckpointFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint; the numbers of one that does not read back are None."""

    file: str
    whole: bool
    number: int | None = None
    #: Written by an orderly stop.
    clean: bool | None = None
    time: int | None = None
    epoch: int | None = None
    message_offset: int | None = None
    action_offset: int | None = None
    shards: int = 0


class LogFacts(msgspec.Struct, kw_only=True):
    """One first-hand log. Rows are messages, or events and definitions."""

    name: str
    segments: int = 0
    start: int = 0
    end: int = 0
    frames: int = 0
    rows: int = 0
    damaged_bytes: int = 0
    torn_bytes: int = 0


class CheckReport(msgspec.Struct, kw_only=True):
    """The whole check-up."""

    path: str
    healthy: bool = True
    #: A server has the directory open at this moment.
    in_use: bool
    format_version: int
    checkpoints: list[CheckpointFacts] = []
    message_log: LogFacts
    kept_log: LogFacts
    action_log: LogFacts
    subjects: int = 0
    missing_messages: int = 0
    #: Delayed messages that wait in buckets.
    scheduled: int = 0
    consume_logs: int = 0
    consume_logs_damaged: int = 0
    quarantine: list[str] = []
    findings: list[Finding] = []

    def add(self, finding: Finding) -> None:
        """One more finding; damage makes the directory unhealthy."""
        self.findings.append(finding)
        if finding.severity == "damaged":
            self.healthy = False
