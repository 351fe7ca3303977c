"""Management of subjects and groups, dead letters and the schedule."""

from __future__ import annotations

from typing import Any

import msgspec

from plait.client.arguments import Duration, Start, seconds_of, start_of
from plait.client.dead import DeadAdmin
from plait.client.schedule import ScheduleAdmin
from plait.retry import Retry


class SubjectInfo(msgspec.Struct, frozen=True):
    """A subject. Times are microseconds since 1970, sizes bytes."""

    subject: str
    partition: str
    start: int
    end: int
    count: int
    size: int
    groups: int
    created: int
    retention_seconds: float | None
    retention_bytes: int | None


class ConsumerInfo(msgspec.Struct, frozen=True):
    """A member of a group."""

    client: str
    online: bool
    held: int


class GroupInfo(msgspec.Struct, frozen=True):
    """A group's progress on one subject; ``lag`` is what is not done yet, handed out or not."""

    subject: str
    group: str
    broadcast: bool
    delivery: str
    retry: Retry
    next: int
    floor: int
    lag: int
    unacked: int
    returned: int
    waiting: int
    redelivered: int
    lost: int
    online: int
    consumers: list[ConsumerInfo]
    #: Dead letters.
    dead: int = 0


class SubjectDetails(msgspec.Struct, frozen=True):
    """A subject with its groups."""

    subject: SubjectInfo
    groups: list[GroupInfo]


class Admin(DeadAdmin, ScheduleAdmin):
    """What ``plait subject``, ``plait group``, ``plait dlq`` and ``plait schedule`` do, as methods."""

    async def subjects(self) -> list[SubjectInfo]:
        """All subjects by name."""
        result: list[SubjectInfo] = await self._run("subject.list", list[SubjectInfo])
        return result

    async def subject(self, subject: str) -> SubjectDetails:
        """A subject and its groups."""
        result: SubjectDetails = await self._run("subject.describe", SubjectDetails, subject=subject)
        return result

    async def create_subject(
        self, subject: str, *, retention: Duration | None = None, retention_bytes: int | None = None
    ) -> SubjectInfo:
        """A new subject; ``retention`` is how long its messages are kept (server default: None)."""
        seconds = None if retention is None else seconds_of(retention)
        result: SubjectInfo = await self._run(
            "subject.create",
            SubjectInfo,
            subject=subject,
            retention_seconds=seconds,
            retention_bytes=retention_bytes,
        )
        return result

    async def delete_subject(self, subject: str) -> None:
        """Delete a subject with its messages and groups, for good."""
        await self._run("subject.delete", None, subject=subject)

    async def groups(self, subject: str | None = None) -> list[GroupInfo]:
        """The groups of a subject, or of all."""
        result: list[GroupInfo] = await self._run("group.list", list[GroupInfo], subject=subject)
        return result

    async def group(self, subject: str, group: str) -> GroupInfo:
        """A group's progress."""
        result: GroupInfo = await self._run("group.describe", GroupInfo, subject=subject, group=group)
        return result

    async def reset_group(self, subject: str, group: str, start: Start) -> int:
        """Move an idle group to "earliest", "latest", a sequence or a time; the sequence it goes on from."""
        position = start_of(start, self._now())
        result: int = await self._run("group.reset", int, subject=subject, group=group, start=position)
        return result

    async def server(self) -> dict[str, Any]:
        """Facts about the server."""
        result: dict[str, Any] = await self._run("server.describe", dict[str, Any])
        return result
