"""Requests to a meta server: routes, brokers, allocations, and the batches of sinks."""

from __future__ import annotations

from typing import Literal

import msgspec

from plait.limits import BrokerEpoch, Int64, Number
from plait.model.logical_partitions import NumberedRun, Run
from plait.model.settings import SubjectSettings
from plait.wire.admin.operation import Nothing, Operation, Request
from plait.wire.admin.subjects import OfGroup, OfSubject
from plait.wire.messages import LpHistory

#: Whether a broker or broker group accepts messages (W) and delivers messages (R).
State = Literal["RW", "R", "W", "NRW"]
Strategy = Literal["exclusive", "shared"]

# --- routes and allocations ---------------------------------------------------------------------


class ExpandSubject(Request):
    """Set how many partitions accept the subject's messages, or which ones (as name@group)."""

    subject: str
    partitions: int | list[str]


class RouteDetails(msgspec.Struct):
    """The route of a subject, its target, and the sealed LPs that groups have finished."""

    subject: str
    version: int
    order: str
    #: As name@group.
    partitions: list[str]
    histories: list[LpHistory]
    target: list[NumberedRun]
    #: Broker group → addresses and state.
    brokers: dict[str, tuple[list[str], State]]
    #: Group → (partition, first, end, fence) of the sealed LPs that the group has finished in the partition.
    passed: dict[str, list[tuple[int, int, int, int]]] = {}
    #: Partitions whose broker has reported what groups have finished.
    reported: list[int] = []


class AllocationReply(msgspec.Struct, frozen=True):
    """The online members of a group and their shares."""

    subject: str
    group: str
    strategy: Strategy
    #: The newest lock epoch; 0 if the strategy is shared.
    epoch: int
    members: dict[str, list[NumberedRun]]


DESCRIBE_ROUTE = Operation("subject.route", OfSubject, RouteDetails)
EXPAND_SUBJECT = Operation("subject.expand", ExpandSubject, RouteDetails)
DESCRIBE_ALLOCATION = Operation("group.allocation", OfGroup, AllocationReply)

# --- brokers ------------------------------------------------------------------------------------


class RegisteredPartition(msgspec.Struct, frozen=True):
    """A partition of a broker, as the broker reports it when it registers."""

    name: str
    subject: str
    settings: SubjectSettings = SubjectSettings()
    #: Wall time in microseconds.
    created: Int64 = 0
    #: The highest route version or epoch that the broker knows for the partition. The meta server then assigns only
    #: higher numbers, even if its database was lost.
    newest: Number = 0
    #: The next four fields serve to rebuild a lost route: the route version that the partition knows; the LPs that it
    #: accepts under this version (None: all); the sealed LPs with their fences; the LPs that were opened after the
    #: partition was created, as (first, end, sequence, route version).
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


class OfBroker(Request):
    """Names a broker and its broker group."""

    group: str
    broker: str


class BrokerHeartbeat(OfBroker, kw_only=True):
    """A heartbeat of a broker."""

    state: State
    #: Why the broker accepts no messages; empty if it accepts messages.
    reason: str = ""


class RegisterBroker(BrokerHeartbeat, kw_only=True):
    """Register a broker that has started; its partitions come page by page."""

    address: str
    epoch: BrokerEpoch
    partitions: list[RegisteredPartition]


class RegisterReply(msgspec.Struct):
    """The cluster that a broker is registered with, and what the meta server knows of the broker's partitions."""

    cluster: str
    #: (subject, group, LPs with epochs): owners with lower epochs have permanently lost the LPs.
    floors: list[tuple[str, str, list[NumberedRun]]]
    #: Partitions that the route of their subject does not name.
    unrouted: list[str]
    #: The newest change number.
    newest: int


class ReportProgress(OfBroker):
    """Reports of finished LPs and removed rows, for some partitions of a broker."""

    partitions: list[PartitionProgress]


class ForgetBroker(Request):
    """Remove a broker group that will not return; with ``lost``, even if messages are lost."""

    group: str
    lost: bool = False


class SetBrokerState(Request):
    """Set the state that the operator wants for a broker group."""

    group: str
    state: State


class BrokerInfo(msgspec.Struct, frozen=True):
    """A broker, as registered with the meta server."""

    group: str
    broker: str
    address: str
    #: The state that the operator set, and the effective state. The effective state allows only what the broker reports
    #: as well, and is "NRW" if the broker is lost.
    wished: State
    state: State
    #: The data epoch: grows by one with every start after a crash.
    epoch: int
    #: The number of its partitions, of all subjects.
    partitions: int
    #: Why the broker accepts no messages, as it reports, for example a full disk. Empty if it accepts messages.
    reason: str = ""


class LostPartition(msgspec.Struct, frozen=True):
    """What is lost with one partition of a broker group that was removed."""

    subject: str
    #: As name@group.
    partition: str
    #: The number of LPs (of 1024) whose messages the partition accepted. Their unfinished messages are lost.
    takes: int
    #: Group → the number of sealed LPs whose messages in the partition the group had not finished.
    groups: dict[str, int]

    def __str__(self) -> str:
        parts = [f"{self.takes} of 1024 logical partitions are sent there"] if self.takes else []
        parts += [f"group {name} has not finished {count} sealed ones" for name, count in self.groups.items()]
        return f"{self.partition}: {', '.join(parts) or 'nothing'}"


REGISTER_BROKER = Operation("broker.register", RegisterBroker, RegisterReply)
#: The newest change number; 0 if the broker must register.
BROKER_HEARTBEAT = Operation("broker.heartbeat", BrokerHeartbeat, int)
REPORT_PROGRESS = Operation("broker.progress", ReportProgress, bool)
FORGET_BROKER = Operation("broker.forget", ForgetBroker, list[LostPartition])
SET_BROKER_STATE = Operation[None]("broker.state", SetBrokerState)
#: Addresses and state of each broker group.
LIST_BROKERS = Operation("broker.list", Nothing, dict[str, tuple[list[str], str]])
DESCRIBE_BROKERS = Operation("broker.describe", Nothing, list[BrokerInfo])

# --- batches of sinks ---------------------------------------------------------------------------

#: (broker group, partition, [(producer of the stage, rows)]).
Stages = list[tuple[str, str, list[tuple[int, int]]]]


class OfBatch(Request):
    """Names a batch of a query."""

    query: str
    batch: int


class DecideBatch(OfBatch):
    """Commit a batch of a query with the stages that hold its rows."""

    stages: Stages


class VetoBatch(OfBatch):
    """Cancel an attempt to write a batch. ``producer`` is the producer of one of the attempt's stages."""

    producer: int


class BatchDone(OfBatch):
    """Mark a batch as published."""

    version: int


class ExchangeStages(BatchDone):
    """Replace the stages of a committed batch."""

    stages: Stages


class UndoneBatches(Request):
    """List unfinished batches of queries whose names come after ``after``."""

    after: str = ""


class BatchDecision(msgspec.Struct, frozen=True):
    """The last decided batch of a query."""

    query: str
    batch: int
    version: int
    stages: Stages
    #: True if all brokers have published the batch.
    done: bool


DECIDE_BATCH = Operation("commit.decide", DecideBatch, BatchDecision)
VETO_BATCH = Operation[BatchDecision | None]("commit.veto", VetoBatch, BatchDecision | None)
EXCHANGE_STAGES = Operation[BatchDecision | None]("commit.exchange", ExchangeStages, BatchDecision | None)
BATCH_DONE = Operation("commit.done", BatchDone, bool)
UNDONE_BATCHES = Operation("commit.undone", UndoneBatches, list[BatchDecision])
