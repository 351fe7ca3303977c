"""Management of subjects and groups: list, create, describe, change and delete them.

A broker without a meta server is the whole cluster: each of its subjects has one partition, and its route is fixed.
"""

from __future__ import annotations

from functools import partial

import msgspec

from plait.broker.groups.group_settings import GroupFilter, set_group_filter
from plait.broker.partitions.partition import Partition
from plait.broker.views import group_view, subject_view
from plait.errors import InvalidArgument
from plait.frame.header import SEQUENCE_MAX
from plait.model import names
from plait.model.settings import SubjectSettings, with_pause, with_rate
from plait.server.broker_host import BrokerHost
from plait.server.operations.partitions import Answer
from plait.wire.admin.operation import Nothing
from plait.wire.admin.rewinds import RewindGroup
from plait.wire.admin.subjects import (
    CreateSubject,
    GroupInfo,
    OfSubject,
    OfSubjects,
    PauseGroup,
    SetGroupFilter,
    SetRate,
    SetSubject,
    SubjectDetails,
)


def describe_subject(host: BrokerHost, request: OfSubject) -> SubjectDetails:
    partition = host.broker.partition_of(request.subject, create=False)
    return SubjectDetails(subject_view(host.broker, partition), _group_views(partition))


def _group_views(partition: Partition) -> list[GroupInfo]:
    return [group_view(group) for _, group in sorted(partition.groups.items())]


def create_subject(host: BrokerHost, request: CreateSubject) -> None:
    names.check("subject", request.subject)
    here = host.config.group
    if request.partitions not in (None, 1):
        raise InvalidArgument(
            f"a subject cannot have {request.partitions} partitions: without a meta server it has one, on {here}"
        )
    if request.groups not in (None, [here]):
        raise InvalidArgument(
            f"broker groups {', '.join(request.groups or ())} are invalid: without a meta server there is only {here}"
        )
    settings = SubjectSettings(request.retention_seconds, request.retention_bytes, request.order)  # type: ignore[arg-type]
    host.broker.create_subject(request.subject, settings)


def set_subject(host: BrokerHost, request: SetSubject) -> None:
    partition = host.broker.partition_of(request.subject, create=False)
    settings = msgspec.structs.replace(partition.row.settings, **request.settings)
    host.broker.catalog.update_subject(request.subject, settings)


def pause(host: BrokerHost, request: PauseGroup) -> int | None:
    settings = host.broker.partition_of(request.subject, create=False).row.settings
    changed = with_pause(settings, request.group, host.broker.clock.now() if request.paused else 0)
    if changed != settings:
        host.broker.catalog.update_subject(request.subject, changed)
    return changed.paused.get(request.group, settings.paused.get(request.group))


def set_rate(host: BrokerHost, request: SetRate) -> None:
    settings = host.broker.partition_of(request.subject, create=False).row.settings
    changed = with_rate(settings, request.group, request.rate)
    if changed != settings:
        host.broker.catalog.update_subject(request.subject, changed)


def rewind(host: BrokerHost, request: RewindGroup, answer: Answer) -> None:
    """Answered after the meta server knows which sealed logical partitions the group has not finished any more.

    An ordered consumer that opens after the answer then begins at the right partition.
    """
    found = host.membership.rewind(
        request.subject, request.group, request.start, skipping=request.skipping, preview=request.preview
    )
    done = partial(answer, found, None)
    partition = host.broker.subjects[request.subject]
    if request.preview:
        done()
    elif partition.fences is None or host.report is None:
        host.broker.turn.answer_after_commit(done)
    else:
        host.broker.turn.answer_after_commit(partial(host.report, partition, done))


def set_filter(host: BrokerHost, request: SetGroupFilter) -> GroupInfo:
    if not 0 < request.version < SEQUENCE_MAX:
        raise InvalidArgument(f"{request.version} is not a version of a filter")
    group = host.membership.group(request.subject, request.group)
    return group_view(set_group_filter(host.broker, group, GroupFilter(request.filter, version=request.version)))


def list_groups(host: BrokerHost, request: OfSubjects) -> list[GroupInfo]:
    return [view for partition in partitions_of(host, request) for view in _group_views(partition)]


def partitions_of(host: BrokerHost, request: OfSubjects) -> list[Partition]:
    if request.subject is not None:
        return [host.broker.partition_of(request.subject, create=False)]
    return [partition for _, partition in sorted(host.broker.subjects.items())]


def list_brokers(host: BrokerHost, _: Nothing) -> dict[str, tuple[list[str], str]]:
    """The address and state of this broker, by the name of its group."""
    return {host.broker.config.group: ([host.address], "R" if host.broker.turn.read_only else "RW")}
