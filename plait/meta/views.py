"""What the meta server answers with, and what it asks brokers for."""

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

#: Whether a broker, or a broker group, can be sent to (W) and consumed from (R).
State = Literal["RW", "R", "W", "NRW"]
Strategy = Literal["exclusive", "shared"]


class RegisteredPartition(msgspec.Struct, frozen=True):
    """A partition that a broker has, as it says when it registers."""

    name: str
    subject: str
    settings: SubjectSettings = SubjectSettings()
    #: Wall time in microseconds.
    created: Int64 = 0
    #: The highest route version or epoch that the broker has heard of there: all that are given out are to be higher,
    #: even by a meta server whose database was lost.
    newest: Number = 0
    #: The version of the route that it knows, the logical partitions that it takes by that (None: all), those that it
    #: took once with the sequences at which their rows end, and those that it took later than from its beginning on
    #: with the sequence and the route version of that. A lost route is rebuilt from these.
    route: Number = 0
    lps: list[Run] | None = None
    fences: list[NumberedRun] = []
    reopened: list[tuple[int, int, int, int]] = []


class PartitionProgress(msgspec.Struct, frozen=True):
    """What is finished in a partition, as its broker reports."""

    name: str
    subject: str
    #: The newest route that the partition has heard of.
    route: int
    #: Group → (first, end, fence) of the logical partitions that end there and that it is done with.
    passed: dict[str, list[NumberedRun]] = {}
    #: Rows below this are gone, and nothing that belongs to them is left; -1: there is no such sequence.
    gone_below: int = -1
    #: Group → the version of the route that it began with.
    began: dict[str, Number] = {}


class Remembered(msgspec.Struct, frozen=True):
    """Whether partitions that have left a subject's route knew a group."""

    #: That of the route; 0: there is no such subject.
    version: int
    #: The version that the group began with; None: they did not know it.
    began: int | None


class LostPartitionView(msgspec.Struct, frozen=True):
    """What is lost with a partition of a broker group that is given up."""

    subject: str
    #: As name@group.
    partition: str
    #: Logical partitions that it took: messages sent there that a group has not come to are lost.
    takes: int
    #: Group → logical partitions whose older messages there it had not finished.
    groups: dict[str, int]

    def __str__(self) -> str:
        parts = [f"{self.takes} of 1024 logical partitions are sent there"] if self.takes else []
        parts += [f"group {name} has not finished {count} that ended there" for name, count in self.groups.items()]
        return f"{self.partition}: {', '.join(parts) or 'nothing'}"


class Registered(msgspec.Struct, frozen=True):
    """What a broker learns when it registers."""

    cluster: str
    #: For each exclusive group of a subject with a partition there: (first, end, epoch) of logical partitions. Lower
    #: epochs have lost them for good, whatever the broker remembers.
    floors: dict[GroupKey, list[NumberedRun]]
    #: Partitions that it has and no route leads to, though their subject has one: nothing is read from them.
    unrouted: list[str]
    #: How far the counter has come that routes and epochs are numbered by.
    newest: int


class BrokerView(msgspec.Struct, frozen=True):
    """A broker as this meta server sees it."""

    group: str
    broker: str
    address: str
    #: What the operator wishes, and what it is: less if the broker says so, "NRW" if it is lost.
    wished: State
    state: State
    epoch: int
    partitions: int
    #: Why the broker takes no messages, as it reports: a full disk. Empty where it takes them.
    reason: str = ""


class RoutedSubjectView(msgspec.Struct, frozen=True):
    """A subject and how far it is spread."""

    name: str
    settings: SubjectSettings
    created: int
    partitions: list[PartitionId]
    #: The groups that consume it, and whether they are ordered.
    groups: dict[str, bool]


class RouteView(msgspec.Struct, frozen=True):
    """All that a client needs to send to a subject and to consume it."""

    route: Route
    settings: SubjectSettings
    #: Broker group → addresses and state.
    brokers: dict[str, tuple[list[str], State]]
    #: Group → (index of the partition, first, end, fence): what it has finished there, as brokers reported.
    passed: dict[str, list[tuple[int, int, int, int]]] = {}
    #: Partitions (by index) of which anything was reported.
    reported: list[int] = []


class Make(NamedTuple):
    """An order: the partition is to take these logical partitions, and to be made if it is not there."""

    subject: str
    version: int
    place: PartitionId
    lps: list[Run]
    settings: SubjectSettings


class Move(NamedTuple):
    """An order: the partition is to take these logical partitions no more, and to say where their rows end."""

    subject: str
    version: int
    place: PartitionId
    lps: list[Run]


class Drop(NamedTuple):
    """An order: nothing leads to the partition any more; it is to go with all that is in it."""

    subject: str
    #: One that is made anew later has heard of a higher one, and stays.
    version: int
    place: PartitionId
    #: The change that gave it up.
    change: int


class HeartbeatView(NamedTuple):
    """The answer to a client's heartbeat."""

    #: Another number than before: there is something new.
    seen: int
    #: Those that are newer than what the client has seen, as they go over the wire.
    packed: msgspec.Raw
    #: Memberships that cannot be, and why.
    refused: dict[GroupKey, PlaitError]
    #: Subject → version of its route.
    routes: dict[str, int]

    @property
    def shares(self) -> list[Share]:
        """Those that are newer than what the client has seen."""
        return split(self.packed)


class AllocationView(msgspec.Struct, frozen=True):
    """The members of a group that are online, and who is to handle what."""

    subject: str
    group: str
    strategy: Strategy
    #: The newest of all; 0 where the strategy is shared.
    epoch: int
    members: dict[str, list[NumberedRun]]
