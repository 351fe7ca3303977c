"""Management of subjects and groups: list, create, describe, change and delete them.

A broker without a meta server is the whole cluster: each of its subjects has one partition, and its route is fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from plait.broker.views import GroupView, SubjectView, group_view, subject_view
from plait.errors import InvalidArgument
from plait.model import names
from plait.model.retry_policy import Retry
from plait.model.settings import SubjectSettings
from plait.server.operations import dead_letters as admin_dead
from plait.server.operations import delayed as admin_schedule
from plait.server.operations import parked_keys as admin_parked
from plait.server.operations import partition_spans as admin_spans

if TYPE_CHECKING:
    from plait.server.broker_host import BrokerHost as Server


class CreateSubject(msgspec.Struct, forbid_unknown_fields=True):
    """Create a subject with retention and order strategy."""

    subject: str
    retention_seconds: float | None = None
    retention_bytes: int | None = None
    order: Literal["best_tried", "strict"] = "best_tried"
    #: Number and broker groups of its partitions; without a meta server only one partition, on this broker.
    partitions: int | None = None
    groups: list[str] | None = None


class SetSubject(msgspec.Struct, forbid_unknown_fields=True):
    """Change settings of a subject. Unset fields stay; None is the broker's default."""

    subject: str
    retention_seconds: float | msgspec.UnsetType | None = msgspec.UNSET
    retention_bytes: int | msgspec.UnsetType | None = msgspec.UNSET


class OfSubject(msgspec.Struct, forbid_unknown_fields=True):
    """Names a subject."""

    subject: str


class OfGroup(msgspec.Struct, forbid_unknown_fields=True):
    """Names a group of a subject."""

    subject: str
    group: str


class ListGroups(msgspec.Struct, forbid_unknown_fields=True):
    """List the groups of a subject; None: of all subjects."""

    subject: str | None = None


class Began(msgspec.Struct, forbid_unknown_fields=True):
    """Get the version of the route that a group began with. No group: the broadcast of a client."""

    partitions: list[str]
    group: str | None
    client: str


class AskRemembered(msgspec.Struct, forbid_unknown_fields=True):
    """Ask whether retired partitions had a group. No group: the broadcast of a client."""

    subject: str
    group: str | None
    client: str


class ResetGroup(msgspec.Struct, forbid_unknown_fields=True):
    """Move an idle group to a position."""

    subject: str
    group: str
    start: str | tuple[str, int]


class SetGroup(msgspec.Struct, forbid_unknown_fields=True):
    """Change the retry settings of an idle group."""

    subject: str
    group: str
    retry: Retry


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """No arguments."""


def _list_subjects(server: Server, _: Nothing) -> list[SubjectView]:
    return [subject_view(server.broker, p) for _, p in sorted(server.broker.subjects.items())]


def _describe_subject(server: Server, request: OfSubject) -> dict[str, Any]:
    partition = server.broker.partition_of(request.subject, create=False)
    return {
        "subject": subject_view(server.broker, partition),
        "groups": [group_view(group) for _, group in sorted(partition.groups.items())],
    }


def _create_subject(server: Server, request: CreateSubject) -> SubjectView:
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
    settings = SubjectSettings(request.retention_seconds, request.retention_bytes, order=request.order)
    return subject_view(server.broker, server.broker.create_subject(request.subject, settings))


def _set_subject(server: Server, request: SetSubject) -> SubjectView:
    partition = server.broker.partition_of(request.subject, create=False)
    settings = msgspec.structs.replace(partition.row.settings, **set_fields(request))
    server.broker.catalog.update_subject(request.subject, settings)
    return subject_view(server.broker, partition)


def set_fields(request: msgspec.Struct) -> dict[str, Any]:
    """The settings that a request sets."""
    names_of = ("retention_seconds", "retention_bytes")
    return {name: value for name in names_of if (value := getattr(request, name)) is not msgspec.UNSET}


def _delete_subject(server: Server, request: OfSubject) -> None:
    server.broker.delete_subject(request.subject)


def _list_groups(server: Server, request: ListGroups) -> list[GroupView]:
    if request.subject is not None:
        partitions = [server.broker.partition_of(request.subject, create=False)]
    else:
        partitions = [p for _, p in sorted(server.broker.subjects.items())]
    return [group_view(group) for p in partitions for _, group in sorted(p.groups.items())]


def _describe_group(server: Server, request: OfGroup) -> GroupView:
    return group_view(server.membership.group(request.subject, request.group), server.broker.turn)


def _began(server: Server, request: Began) -> int | None:
    return server.membership.began(request.partitions, request.group, request.client)


def _reset_group(server: Server, request: ResetGroup) -> int:
    return server.membership.reset(request.subject, request.group, request.start)


def _set_group(server: Server, request: SetGroup) -> GroupView:
    return group_view(server.membership.set_retry(request.subject, request.group, request.retry))


def _delete_group(server: Server, request: OfGroup) -> None:
    server.membership.delete(request.subject, request.group)


def _forget_group(server: Server, request: OfGroup) -> bool:
    """Only meta servers store allocations, so a broker has none to forget."""
    return False


def _remembered(server: Server, request: AskRemembered) -> dict[str, Any]:
    """Without a meta server no partition is ever retired."""
    return {"version": 0, "began": None}


def _describe_server(server: Server, _: Nothing) -> dict[str, Any]:
    return server.describe()


def _list_brokers(server: Server, _: Nothing) -> dict[str, tuple[list[str], str]]:
    """The address and state of this broker, by the name of its group."""
    return {server.broker.config.group: ([server.address], "R" if server.broker.turn.read_only else "RW")}


class Operation(NamedTuple):
    """The type of a request's arguments, its function, and whether it changes state."""

    request: type[Any]
    call: Callable[[Any, Any], Any]
    changes: bool = False


_OPERATIONS: dict[str, Operation] = {
    "subject.list": Operation(Nothing, _list_subjects),
    "subject.describe": Operation(OfSubject, _describe_subject),
    "subject.create": Operation(CreateSubject, _create_subject, changes=True),
    "subject.set": Operation(SetSubject, _set_subject, changes=True),
    "subject.delete": Operation(OfSubject, _delete_subject, changes=True),
    "group.list": Operation(ListGroups, _list_groups),
    "group.describe": Operation(OfGroup, _describe_group),
    "group.began": Operation(Began, _began),
    "group.reset": Operation(ResetGroup, _reset_group, changes=True),
    "group.set": Operation(SetGroup, _set_group, changes=True),
    "group.delete": Operation(OfGroup, _delete_group, changes=True),
    "group.forget": Operation(OfGroup, _forget_group),
    "group.remembered": Operation(AskRemembered, _remembered),
    "group.parked": Operation(admin_parked.ListParked, admin_parked.list_parked),
    "group.resume": Operation(admin_parked.Unpark, admin_parked.resume, changes=True),
    "group.skip": Operation(admin_parked.Unpark, admin_parked.skip, changes=True),
    "dlq.queues": Operation(admin_dead.ListQueues, admin_dead.list_queues),
    "dlq.list": Operation(admin_dead.ListLetters, admin_dead.list_letters),
    "dlq.reasons": Operation(admin_dead.Page, admin_dead.count_reasons),
    "dlq.resend": Operation(admin_dead.ChangeLetters, admin_dead.resend, changes=True),
    "dlq.purge": Operation(admin_dead.ChangeLetters, admin_dead.purge, changes=True),
    "partition.spans": Operation(admin_spans.DescribeSpans, admin_spans.describe),
    "partition.cuts": Operation(admin_spans.CutSpans, admin_spans.cut),
    "server.describe": Operation(Nothing, _describe_server),
    "broker.list": Operation(Nothing, _list_brokers),
    "schedule.cancel": Operation(admin_schedule.Cancel, admin_schedule.cancel, changes=True),
    "schedule.reschedule": Operation(admin_schedule.Reschedule, admin_schedule.reschedule, changes=True),
    "schedule.list": Operation(admin_schedule.ListScheduled, admin_schedule.list_),
    "schedule.count": Operation(admin_schedule.CountScheduled, admin_schedule.count),
}

#: Operations of meta servers.
_META_OPERATIONS = frozenset(
    (
        "subject.route",
        "subject.expand",
        "broker.describe",
        "broker.state",
        "group.allocation",
        "commit.decide",
        "commit.veto",
        "commit.exchange",
        "commit.done",
        "commit.undone",
    )
)


def run(server: Server, name: str, arguments: dict[str, Any]) -> tuple[Any, bool]:
    """Execute a request. Returns its result, and whether the reply must wait for the commit."""
    operation = _OPERATIONS.get(name)
    if name in _META_OPERATIONS:
        raise InvalidArgument(f"this is a broker; send {name} to a meta server")
    if operation is None:
        raise InvalidArgument(f"operation {name!r} is not known; is the client newer than the server?")
    try:
        request = msgspec.convert(arguments, operation.request)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{name}: {error}") from None
    return operation.call(server, request), operation.changes
