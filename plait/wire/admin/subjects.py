"""Subjects and groups: list, create, describe, change and delete them."""

from __future__ import annotations

from typing import Any

import msgspec

from plait.model.filter_terms import FilterTerms
from plait.model.rate import Rate
from plait.model.retry_policy import Retry
from plait.wire.admin.operation import Nothing, Operation, Request


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
    #: The limit of what is stored a second, for the whole subject; None: there is none.
    send_rate: Rate | None = None


class ConsumerInfo(msgspec.Struct, frozen=True):
    """A member of a group."""

    client: str
    online: bool
    held: int
    #: The number of locks that an ordered consumer has, over all partitions of the subject.
    locks: int = 0


class GroupInfo(msgspec.Struct, frozen=True):
    """A group's progress on one subject; ``lag`` is the number of unfinished messages, in flight or not."""

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
    #: The number of dead letters.
    dead: int = 0
    ordered: bool = False
    #: The number of keys that a failed message holds back, and of those that are parked until ``resume`` or ``skip``.
    holding: int = 0
    parked: int = 0
    #: "key" if the messages of a key go to one member, without order; otherwise None.
    affinity: str | None = None
    #: ``estimated``: ``lag``, ``unacked`` and ``returned`` are estimates. ``lost_estimated``: ``lost`` is an estimate.
    #: The messages of an ordered group's members are interleaved, and counting each of them would take too long.
    estimated: bool = False
    lost_estimated: bool = False
    #: The number of messages that the filter left out.
    filtered: int = 0
    #: What a message must be like to be delivered; None: every message is.
    filter: FilterTerms | None = None
    #: How often the filter was set.
    filter_version: int = 0
    #: Since when the group is paused, in microseconds since 1970; None: it is not.
    paused: int | None = None
    #: The limit of what is delivered a second, over all partitions; None: there is none.
    rate: Rate | None = None
    #: What identifies a tenant: "key", or the name of a header; None: the group is not fair.
    fair_by: str | None = None


class SubjectDetails(msgspec.Struct, frozen=True):
    """A subject with its groups; with several partitions, the numbers are sums over all of them."""

    subject: SubjectInfo
    groups: list[GroupInfo]
    #: The subject's numbers for each partition.
    partitions: list[SubjectInfo] = []


class Remembered(msgspec.Struct, frozen=True):
    """Whether retired partitions of a subject knew a group."""

    #: The version of the subject's route; 0 if there is no such subject.
    version: int
    #: The route version at which the group started; None if those partitions did not know it.
    began: int | None
    #: True if a partition that knew the group has left the route.
    left_route: bool = False


class CreateSubject(Request):
    """Create a subject with retention, order strategy and partitions."""

    subject: str
    retention_seconds: float | None = None
    retention_bytes: int | None = None
    order: str = "best_tried"
    #: Number and broker groups of its partitions; None: one on each of two broker groups. Without a meta server it has
    #: one partition, on this broker.
    partitions: int | None = None
    groups: list[str] | None = None


class SetSubject(Request):
    """Change settings of a subject. Unset fields stay; None is the broker's default."""

    subject: str
    retention_seconds: float | msgspec.UnsetType | None = msgspec.UNSET
    retention_bytes: int | msgspec.UnsetType | None = msgspec.UNSET

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the request sets."""
        given = {"retention_seconds": self.retention_seconds, "retention_bytes": self.retention_bytes}
        return {name: value for name, value in given.items() if value is not msgspec.UNSET}


class MatchSubjects(Request):
    """List the subjects that patterns cover, at once or when a change newer than ``seen`` may alter the list.

    A pattern is a name, or a prefix and ``*``. The reply comes after ``wait`` seconds at the latest.
    """

    patterns: list[str]
    seen: int = -1
    wait: float = 0.0


class MatchedSubjects(msgspec.Struct, frozen=True):
    """Matching subjects as of the change ``seen``, at most ``SUBSCRIBED_SUBJECTS_MAX``; ``more``: there are others."""

    seen: int
    names: list[str]
    more: bool = False


class OfSubject(Request):
    """Names a subject."""

    subject: str


class OfSubjects(Request):
    """Names a subject; None: all subjects."""

    subject: str | None = None


class OfGroup(Request):
    """Names a group of a subject."""

    subject: str
    group: str


class Began(Request):
    """Get the route version that a group began with. If ``group`` is None, it is the broadcast group of the client."""

    partitions: list[str]
    group: str | None
    client: str


class AskRemembered(Request):
    """Ask whether retired partitions had a group. If ``group`` is None, it is the broadcast group of the client."""

    subject: str
    group: str | None
    client: str


class PauseGroup(OfGroup):
    """Pause a group, or resume it."""

    paused: bool


class SetRate(Request):
    """Set the limit of a group or, with ``group`` None, of what is stored; ``rate`` None: there is none."""

    subject: str
    group: str | None
    rate: Rate | None


class SetGroup(OfGroup):
    """Change settings of an idle group. ``retry`` None and an unset ``fair_by`` stay."""

    retry: Retry | None = None
    fair_by: str | msgspec.UnsetType | None = msgspec.UNSET


class SetGroupFilter(OfGroup):
    """Change the filter of a group. ``version`` is higher than that of its filter in any partition."""

    filter: FilterTerms | None
    version: int


LIST_SUBJECTS = Operation("subject.list", Nothing, list[SubjectInfo])
MATCH_SUBJECTS = Operation("subject.match", MatchSubjects, MatchedSubjects)
DESCRIBE_SUBJECT = Operation("subject.describe", OfSubject, SubjectDetails)
CREATE_SUBJECT = Operation[None]("subject.create", CreateSubject)
SET_SUBJECT = Operation[None]("subject.set", SetSubject)
DELETE_SUBJECT = Operation[None]("subject.delete", OfSubject)
LIST_GROUPS = Operation("group.list", OfSubjects, list[GroupInfo])
DESCRIBE_GROUP = Operation("group.describe", OfGroup, GroupInfo)
GROUP_BEGAN = Operation[int | None]("group.began", Began, int | None)
GROUP_REMEMBERED = Operation("group.remembered", AskRemembered, Remembered)
#: Since when the group is paused or, for a resumed group, was paused; None: it was not paused.
PAUSE_GROUP = Operation[int | None]("group.pause", PauseGroup, int | None)
SET_RATE = Operation[None]("subject.rate", SetRate)
SET_GROUP = Operation("group.set", SetGroup, GroupInfo)
SET_GROUP_FILTER = Operation("group.filter", SetGroupFilter, GroupInfo)
DELETE_GROUP = Operation[None]("group.delete", OfGroup)
#: Forget the allocation and the settings of a group. True if there were any.
FORGET_GROUP = Operation("group.forget", OfGroup, bool)
DESCRIBE_SERVER = Operation("server.describe", Nothing, dict[str, Any])
