"""Management of subjects and groups, dead letters, parked keys, the schedule and the cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import msgspec

from plait.client.admin.cluster_admin import ClusterAdmin
from plait.client.admin.dead_letter_admin import DeadAdmin
from plait.client.admin.parked_key_admin import ParkedAdmin
from plait.client.admin.schedule_admin import ScheduleAdmin
from plait.client.arguments import Duration, Start, seconds_of, start_of
from plait.client.net.admin_calls import Partition
from plait.errors import GroupNotFound, InvalidArgument
from plait.model.retry_policy import Retry


class SubjectInfo(msgspec.Struct, frozen=True):
    """A subject, or one partition of it. Times are microseconds since 1970, sizes bytes."""

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
    #: Locks of an ordered one: logical partitions that it may handle, over all partitions of the subject.
    locks: int = 0


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
    ordered: bool = False
    #: Keys that failed and hold their place, and those of them that are parked until somebody decides.
    holding: int = 0
    parked: int = 0
    #: What its members keep to one of them, without order: "key", or nothing.
    affinity: str | None = None
    #: ``lag``, ``unacked`` and ``returned`` are estimates, or ``lost`` is one: messages that different members of an
    #: ordered group own lie between each other, and counting them one by one would take too long.
    estimated: bool = False
    lost_estimated: bool = False


#: What is added up over the partitions of a subject: all its numbers. Who is online at several of them is so once.
_GROUP_SUMS: Final = [f.name for f in msgspec.structs.fields(GroupInfo) if f.type is int and f.name != "online"]


class SubjectDetails(msgspec.Struct, frozen=True):
    """A subject with its groups; with several partitions, what is said of it and of them is the sum over all."""

    subject: SubjectInfo
    groups: list[GroupInfo]
    #: The same for each partition.
    partitions: list[SubjectInfo] = []


class Admin(DeadAdmin, ScheduleAdmin, ClusterAdmin, ParkedAdmin):
    """What ``plait subject``, ``plait group``, ``plait dlq``, ``plait schedule`` and ``plait cluster`` do, as methods.

    Where a subject has several partitions, ``partition`` names the one that is meant: "name@group".
    """

    async def subjects(self) -> list[SubjectInfo]:
        """All subjects by name, an entry for each partition."""
        found = [info for each in await self._everywhere("subject.list", list[SubjectInfo]) for info in each]
        return sorted(found, key=lambda info: (info.subject, info.partition))

    async def subject(self, subject: str) -> SubjectDetails:
        """A subject, its partitions and its groups."""
        answers = await self._each(await self._places(subject), "subject.describe", SubjectDetails)
        details: list[SubjectDetails] = [answer for _, answer in answers]
        groups = merged_groups([group for each in details for group in each.groups])
        partitions = [each.subject for each in details]
        return SubjectDetails(merged_subject(partitions, len(groups)), groups, partitions)

    async def create_subject(
        self,
        subject: str,
        *,
        retention: Duration | None = None,
        retention_bytes: int | None = None,
        order: Literal["best_tried", "strict"] = "best_tried",
        partitions: int | None = None,
        groups: Sequence[str] | None = None,
    ) -> SubjectInfo:
        """A new subject; ``retention`` is how long its messages are kept (server default: None).

        ``order`` says what a failure does to the order of its key. It has so many ``partitions`` on these broker
        ``groups``; if nothing is said, one on each of two.
        """
        if isinstance(groups, str):
            raise InvalidArgument(f"groups {groups!r} is text; use a list of names")
        await self._run(
            "subject.create",
            Any,
            subject=subject,
            retention_seconds=None if retention is None else seconds_of(retention),
            retention_bytes=retention_bytes,
            order=order,
            partitions=partitions,
            groups=None if groups is None else list(groups),
        )
        return (await self.subject(subject)).subject

    async def set_subject(
        self,
        subject: str,
        *,
        retention: Duration | Literal["default"] | None = None,
        retention_bytes: int | Literal["default"] | None = None,
    ) -> SubjectInfo:
        """Change how long, or how much of, a subject's messages are kept; "default" is what the server keeps.

        What is left out stays as it is. A shorter retention takes effect within a minute: messages beyond it go, and
        with them the log segments that no other subject needs. The order of a subject cannot be changed.
        """
        changed: dict[str, Any] = {}
        if retention is not None:
            changed["retention_seconds"] = None if retention == "default" else seconds_of(retention)
        if retention_bytes is not None:
            changed["retention_bytes"] = None if retention_bytes == "default" else retention_bytes
        if not changed:
            raise InvalidArgument(f"nothing of {subject!r} is to be changed; say retention= or retention_bytes=")
        await self._run("subject.set", Any, subject=subject, **changed)
        return (await self.subject(subject)).subject

    async def delete_subject(self, subject: str) -> None:
        """Delete a subject with its messages and groups, for good."""
        await self._run("subject.delete", None, subject=subject)

    async def groups(self, subject: str | None = None, *, partition: Partition | None = None) -> list[GroupInfo]:
        """The groups of a subject, of one of its partitions, or of all subjects."""
        if subject is None:
            if partition is not None:
                raise InvalidArgument(f"partition {str(partition)!r} is one of a subject; name the subject too")
            found = [info for each in await self._everywhere("group.list", list[GroupInfo]) for info in each]
        else:
            answers = await self._each(await self._places(subject, partition), "group.list", list[GroupInfo])
            found = [info for _, answer in answers for info in answer]
        return merged_groups(found)

    async def group(self, subject: str, group: str, *, partition: Partition | None = None) -> GroupInfo:
        """A group's progress; with several partitions, the sum over them."""
        places = await self._places(subject, partition)
        [merged] = merged_groups([a for _, a in await self._each(places, "group.describe", GroupInfo, group=group)])
        return merged

    async def reset_group(self, subject: str, group: str, start: Start, *, partition: Partition | None = None) -> int:
        """Move an idle group to "earliest", "latest", a sequence or a time; the sequence it goes on from.

        A sequence is one of a partition. Where several are moved, what it goes on from is the sum over them.
        """
        position = start_of(start, self._now())
        if not isinstance(position, str) and position[0] == "sequence":
            places = [await self._place(subject, partition, "sequences")]
        else:
            places = await self._places(subject, partition)
        answers = await self._each(places, "group.reset", int, group=group, start=position)
        return sum(sequence for _, sequence in answers)

    async def set_group(self, subject: str, group: str, *, retry: Retry) -> GroupInfo:
        """Change how an idle group retries; ``GroupBusy`` while it has consumers.

        It holds for members that name no policy. The first member that names one sets it again.
        """
        if not isinstance(retry, Retry):
            raise InvalidArgument(f"retry is {retry!r}; use plait.Retry(...)")
        await self._each(await self._places(subject), "group.set", GroupInfo, group=group, retry=retry)
        return await self.group(subject, group)

    async def delete_group(self, subject: str, group: str) -> None:
        """Forget an idle group, its position and its dead letters, permanently; ``GroupBusy`` while it has consumers.

        A consumer that comes later under the same name is the first member of a new group.
        """
        places = await self._places(subject)
        # First the brokers, each of which refuses while it has a consumer of the group; then what members agreed on,
        # and that partitions which have left the route knew it. It may be all that is known of the group.
        missing: GroupNotFound | None = None
        try:
            await self._each(places, "group.delete", None, group=group)
        except GroupNotFound as error:
            missing = error
        remembered = await self._run("group.forget", bool, subject=subject, group=group)
        if missing is not None and not remembered:
            raise missing

    async def server(self) -> dict[str, Any]:
        """Facts about the server."""
        result: dict[str, Any] = await self._run("server.describe", dict[str, Any])
        return result


def merged_subject(partitions: list[SubjectInfo], groups: int) -> SubjectInfo:
    """A subject from what its partitions say of it."""
    if len(partitions) == 1:
        return partitions[0]
    return msgspec.structs.replace(
        partitions[0],
        partition=", ".join(each.partition for each in partitions),
        groups=groups,
        created=min(each.created for each in partitions),
        **_sums(partitions, ("start", "end", "count", "size")),
    )


def merged_groups(found: list[GroupInfo]) -> list[GroupInfo]:
    """One entry a group from what each partition says of it, by their names."""
    together: dict[tuple[str, str], list[GroupInfo]] = {}
    for info in found:
        together.setdefault((info.subject, info.group), []).append(info)
    return [_merged_group(together[key]) for key in sorted(together)]


def _merged_group(parts: list[GroupInfo]) -> GroupInfo:
    if len(parts) == 1:
        return parts[0]
    consumers: dict[str, ConsumerInfo] = {}
    for consumer in (consumer for part in parts for consumer in part.consumers):
        known = consumers.get(consumer.client, ConsumerInfo(consumer.client, False, 0))
        consumers[consumer.client] = ConsumerInfo(
            consumer.client,
            known.online or consumer.online,
            known.held + consumer.held,
            known.locks + consumer.locks,
        )
    return msgspec.structs.replace(
        parts[0],
        consumers=list(consumers.values()),
        online=sum(consumer.online for consumer in consumers.values()),
        estimated=any(part.estimated for part in parts),
        lost_estimated=any(part.lost_estimated for part in parts),
        **_sums(parts, _GROUP_SUMS),
    )


def _sums(parts: Sequence[msgspec.Struct], fields: Iterable[str]) -> dict[str, int]:
    return {field: sum(getattr(part, field) for part in parts) for field in fields}
