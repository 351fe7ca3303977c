"""The report of a check: facts about each part, and findings with their severity and advice."""

from __future__ import annotations

from typing import Literal

import msgspec

#: "note": not damage; for example, what a crash leaves behind. "damaged": bytes differ from what Plait wrote.
Severity = Literal["note", "damaged"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. ``offset`` is the position in the file, if there is one."""

    severity: Severity
    part: str
    file: str
    offset: int | None = None
    size: int | None = None
    what: str
    harm: str
    advice: str


class CheckpointFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint. The fields of an unreadable one are None."""

    file: str
    whole: bool
    number: int | None = None
    #: True if an orderly stop of the server wrote the checkpoint.
    clean: bool | None = None
    time: int | None = None
    epoch: int | None = None
    message_offset: int | None = None
    action_offset: int | None = None
    shards: int = 0


class LogFacts(msgspec.Struct, kw_only=True):
    """One first-hand log. Rows are messages, retained messages, or events and definitions."""

    name: str
    segments: int = 0
    start: int = 0
    end: int = 0
    frames: int = 0
    rows: int = 0
    damaged_bytes: int = 0
    torn_bytes: int = 0


class CheckReport(msgspec.Struct, kw_only=True):
    """The result of a check."""

    path: str
    healthy: bool = True
    #: True if a server uses the directory now.
    in_use: bool
    format_version: int
    checkpoints: list[CheckpointFacts] = []
    message_log: LogFacts
    retained_log: LogFacts
    action_log: LogFacts
    subjects: int = 0
    missing_messages: int = 0
    #: Delayed messages that wait in buckets.
    scheduled: int = 0
    consume_logs: int = 0
    consume_logs_damaged: int = 0
    quarantine: list[str] = []
    findings: list[Finding] = []

    def add(
        self,
        severity: Severity,
        part: str,
        file: str,
        what: str,
        harm: str,
        advice: str,
        *,
        offset: int | None = None,
        size: int | None = None,
    ) -> None:
        """Add a finding. Damage makes the directory unhealthy."""
        self.findings.append(
            Finding(
                severity=severity, part=part, file=file, offset=offset, size=size, what=what, harm=harm, advice=advice
            )
        )
        if severity == "damaged":
            self.healthy = False
