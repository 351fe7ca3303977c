"""What the meta service returns besides the replies of ``plait.wire.admin``, and broker orders."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from plait.errors import PlaitError
from plait.meta.database.mirror import GroupKey
from plait.meta.members.shares import Share, split
from plait.model.logical_partitions import NumberedRun, Run
from plait.model.route import PartitionId, Route
from plait.model.settings import SubjectSettings
from plait.wire.admin.cluster import State


class Registered(msgspec.Struct, frozen=True):
    """The reply to a broker's registration."""

    cluster: str
    #: For each ordered group of a subject with a partition there: (first, end, epoch) of LPs. Owners with lower epochs
    #: have permanently lost the LPs, whatever the broker has recorded.
    floors: dict[GroupKey, list[NumberedRun]]
    #: Partitions of the broker that the route of their subject does not name: nothing is read from them.
    unrouted: list[str]
    #: The newest change number. Route versions and epochs are change numbers.
    newest: int


class RoutedSubjectView(msgspec.Struct, frozen=True):
    """A subject with its partitions and groups."""

    name: str
    settings: SubjectSettings
    created: int
    partitions: list[PartitionId]
    #: Group → whether it is ordered.
    groups: dict[str, bool]


class RouteView(msgspec.Struct, frozen=True):
    """What a client needs to send to a subject and to consume it."""

    route: Route
    settings: SubjectSettings
    #: Broker group → addresses and state.
    brokers: dict[str, tuple[list[str], State]]
    #: Group → (partition index, first, end, fence) of the LPs that it has finished there, as brokers reported.
    passed: dict[str, list[tuple[int, int, int, int]]] = {}
    #: Indexes of the partitions that have a report.
    reported: list[int] = []


class Make(NamedTuple):
    """Broker order: create the partition if it does not exist, and open it for these LPs."""

    subject: str
    version: int
    place: PartitionId
    lps: list[Run]
    settings: SubjectSettings


class Move(NamedTuple):
    """Broker order: seal these LPs of the partition, and reply with their fences."""

    subject: str
    version: int
    place: PartitionId
    lps: list[Run]


class Drop(NamedTuple):
    """Broker order: drop the partition with all its messages, because no route names it."""

    subject: str
    #: A partition that was created again later knows a higher version and stays.
    version: int
    place: PartitionId
    #: The change that removed it from the route.
    change: int


class HeartbeatView(NamedTuple):
    """The reply to a client's heartbeat."""

    #: The newest change that the reply includes. It differs from the client's number if there is something new.
    seen: int
    #: The shares that the client does not have yet, as they are sent.
    packed: msgspec.Raw
    #: Refused memberships and the reasons.
    refused: dict[GroupKey, PlaitError]
    #: Subject → route version.
    routes: dict[str, int]

    @property
    def shares(self) -> list[Share]:
        """``packed``, decoded."""
        return split(self.packed)
