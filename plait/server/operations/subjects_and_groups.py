"""Management of subjects and groups: list, create, describe, change and delete them.

A broker without a meta server is the whole cluster: each of its subjects has one partition, and its route is fixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from plait.broker.groups import group_settings
from plait.broker.partitions.partition import Partition
from plait.broker.views import group_view, subject_view
from plait.errors import InvalidArgument
from plait.model import names
from plait.model.settings import SubjectSettings
from plait.wire.admin.operation import Nothing
from plait.wire.admin.subjects import (
    AskRemembered,
    Began,
    CreateSubject,
    GroupInfo,
    OfGroup,
    OfSubject,
    OfSubjects,
    Remembered,
    ResetGroup,
    SetGroup,
    SetSubject,
    SubjectDetails,
    SubjectInfo,
)

if TYPE_CHECKING:
    from plait.server.broker_host import BrokerHost as Server


def list_subjects(server: Server, _: Nothing) -> list[SubjectInfo]:
    return [subject_view(server.broker, p) for _, p in sorted(server.broker.subjects.items())]


def describe_subject(server: Server, request: OfSubject) -> SubjectDetails:
    partition = server.broker.partition_of(request.subject, create=False)
    return SubjectDetails(subject_view(server.broker, partition), _group_views(partition))


def _group_views(partition: Partition) -> list[GroupInfo]:
    return [group_view(group) for _, group in sorted(partition.groups.items())]


def create_subject(server: Server, request: CreateSubject) -> None:
    names.check("subject", request.subject)
    here = server.config.group
    if request.partitions not in (None, 1):
        raise InvalidArgument(
            f"a subject cannot have {request.partitions} partitions: without a meta server it has one, on {here}"
        )
    if request.groups not in (None, [here]):
        raise InvalidArgument(
            f"broker groups {', '.join(request.groups or ())} are invalid: without a meta server there is only {here}"
        )
    settings = SubjectSettings(request.retention_seconds, request.retention_bytes, request.order)  # type: ignore[arg-type]
    server.broker.create_subject(request.subject, settings)


def set_subject(server: Server, request: SetSubject) -> None:
    partition = server.broker.partition_of(request.subject, create=False)
    settings = msgspec.structs.replace(partition.row.settings, **request.settings)
    server.broker.catalog.update_subject(request.subject, settings)


def delete_subject(server: Server, request: OfSubject) -> None:
    server.broker.delete_subject(request.subject)


def list_groups(server: Server, request: OfSubjects) -> list[GroupInfo]:
    return [view for partition in partitions_of(server, request) for view in _group_views(partition)]


def partitions_of(server: Server, request: OfSubjects) -> list[Partition]:
    """The partition of the named subject, or of all subjects."""
    if request.subject is not None:
        return [server.broker.partition_of(request.subject, create=False)]
    return [partition for _, partition in sorted(server.broker.subjects.items())]


def describe_group(server: Server, request: OfGroup) -> GroupInfo:
    return group_view(server.membership.group(request.subject, request.group), counted=True)


def began(server: Server, request: Began) -> int | None:
    return group_settings.began(server.broker, request.partitions, request.group, request.client)


def reset_group(server: Server, request: ResetGroup) -> int:
    return server.membership.reset(request.subject, request.group, request.start)


def set_group(server: Server, request: SetGroup) -> GroupInfo:
    return group_view(server.membership.set_retry(request.subject, request.group, request.retry))


def delete_group(server: Server, request: OfGroup) -> None:
    server.membership.delete(request.subject, request.group)


def forget_group(server: Server, request: OfGroup) -> bool:
    """Only meta servers store allocations, so a broker has none to forget."""
    return False


def remembered(server: Server, request: AskRemembered) -> Remembered:
    """Without a meta server no partition is ever retired."""
    return Remembered(0, None)


def describe_server(server: Server, _: Nothing) -> dict[str, Any]:
    return server.describe()


def list_brokers(server: Server, _: Nothing) -> dict[str, tuple[list[str], str]]:
    """The address and state of this broker, by the name of its group."""
    return {server.broker.config.group: ([server.address], "R" if server.broker.turn.read_only else "RW")}
