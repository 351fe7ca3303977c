"""Replies of the meta server, reports of brokers, and broker orders."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from plait.errors import PlaitError
from plait.limits import Int64, Number
from plait.meta.database.mirror import GroupKey
from plait.meta.members.shares import Share, split
from plait.model.lp_runs import NumberedRun, Run
from plait.model.route import PartitionId, Route
from plait.model.settings import SubjectSettings

#: Whether a broker or a broker group accepts sends (W) and serves consumers (R).
State = Literal["RW", "R", "W", "NRW"]
Strategy = Literal["exclusive", "shared"]


class RegisteredPartition(msgspec.Struct, frozen=True):
    """A partition of a broker, as the broker reports it when it registers."""

    name: str
    subject: str
    settings: SubjectSettings = SubjectSettings()
    #: Wall time in microseconds.
    created: Int64 = 0
    #: The highest route version or epoch that the broker knows there. The meta server issues only higher ones, even
    #: after its database was lost.
    newest: Number = 0
    #: The route version that the partition knows; the LPs that it takes under that version (None: all); the sealed LPs
    #: with their fences; the LPs that were opened after the partition was created, as (first, end, sequence, route
    #: version). A lost route is rebuilt from these.
    route: Number = 0
    lps: list[Run] | None = None
    fences: list[NumberedRun] = []
    reopened: list[tuple[int, int, int, int]] = []


class PartitionProgress(msgspec.Struct, frozen=True):
    """A broker's report of what is finished in a partition."""

    name: str
    subject: str
    #: The newest route version that the partition knows.
    route: int
    #: Group → (first, end, fence) of the sealed LPs that the group has finished.
    passed: dict[str, list[NumberedRun]] = {}
    #: Rows below this sequence are removed with all their state; -1 if there is no such sequence.
    gone_below: int = -1
    #: Group → the route version at which the group started.
    began: dict[str, Number] = {}


class Remembered(msgspec.Struct, frozen=True):
    """Whether retired partitions of a subject knew a group."""

    #: The version of the subject's route; 0 if there is no such subject.
    version: int
    #: The route version at which the group started; None if those partitions did not know it.
    began: int | None


class LostPartitionView(msgspec.Struct, frozen=True):
    """What is lost with a partition of a broker group that is removed."""

    subject: str
    #: Partition id as name@group.
    partition: str
    #: Number of LPs that were sent to it: their unconsumed messages there are lost.
    takes: int
    #: Group → number of sealed LPs that the group had not finished there.
    groups: dict[str, int]

    def __str__(self) -> str:
        parts = [f"{self.takes} of 1024 logical partitions are sent there"] if self.takes else []
        parts += [f"group {name} has not finished {count} sealed ones" for name, count in self.groups.items()]
        return f"{self.partition}: {', '.join(parts) or 'nothing'}"


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


class BrokerView(msgspec.Struct, frozen=True):
    """A broker, as this meta server knows it."""

    group: str
    broker: str
    address: str
    #: The state that the operator set, and the actual one: reduced by what the broker reports, "NRW" if it is lost.
    wished: State
    state: State
    epoch: int
    partitions: int
    #: Why the broker accepts no messages, as it reports (a full disk). Empty if it accepts messages.
    reason: str = ""


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


class AllocationView(msgspec.Struct, frozen=True):
    """The online members of a group and their shares."""

    subject: str
    group: str
    strategy: Strategy
    #: The newest lock epoch; 0 if the strategy is shared.
    epoch: int
    members: dict[str, list[NumberedRun]]
