"""Partitions of a broker: their sequences, the orders of a meta server, and the stages of sinks."""

from __future__ import annotations

import msgspec

from plait.limits import Int64, Number
from plait.model.logical_partitions import NumberedRun, Run
from plait.model.settings import SubjectSettings
from plait.wire.admin.operation import Operation, Request

# --- sequences ----------------------------------------------------------------------------------


class DescribeSpans(Request):
    """Partitions by name, and times (microseconds) to find in each."""

    names: list[str]
    times: list[Int64] = msgspec.field(default_factory=list)


class SpanRow(msgspec.Struct, frozen=True):
    """The sequences [start, end) of a partition, and the data epochs that stored them.

    ``number`` changes when the subject is deleted and created again. For each requested time, ``at`` has the first
    sequence that was stored at that time or later, and ``until`` has the end of the sequences stored before that time.
    """

    name: str
    subject: str
    number: int
    start: int
    end: int
    #: (first sequence, epoch), ascending.
    epochs: list[tuple[int, int]]
    at: list[int] = []
    until: list[int] = []
    #: The broker group.
    group: str = ""
    #: True if the partition accepts no more messages, so that ``end`` does not change.
    sealed: bool = False


class CutSpans(Request):
    """Cut ranges (name, start, end, size) of partitions into pieces of at most ``size`` bytes; 0: do not cut.

    With ``reach`` the reply has only one cut per range: the end of about ``size`` bytes from its start.
    """

    ranges: list[tuple[str, Int64, Int64, Int64]]
    reach: bool = False


class SpanCuts(msgspec.Struct, frozen=True):
    """The size of a range in bytes, and the sequences at which its pieces end."""

    size: int
    ends: list[int]


DESCRIBE_SPANS = Operation("partition.spans", DescribeSpans, list[SpanRow])
CUT_SPANS = Operation("partition.cuts", CutSpans, list[SpanCuts])

# --- orders of a meta server --------------------------------------------------------------------


class OpenPartition(Request):
    """Create a partition of a subject if it does not exist, and open it for logical partitions."""

    subject: str
    name: str
    lps: list[Run]
    version: Number
    settings: SubjectSettings = SubjectSettings()


class SealPartition(Request):
    """Seal logical partitions of a partition."""

    name: str
    lps: list[Run]
    version: Number


class DropPartition(Request):
    """Drop a partition that is no longer in its subject's route, as of the route version in the request."""

    subject: str
    name: str
    version: Number


# The replies are sent when the order is durable.
OPEN_PARTITION = Operation[None]("partition.open", OpenPartition)
#: The LPs with the sequences at which they are sealed.
SEAL_PARTITION = Operation("partition.seal", SealPartition, list[NumberedRun])
DROP_PARTITION = Operation[None]("partition.drop", DropPartition)

# --- stages of sinks ----------------------------------------------------------------------------


class OpenStage(Request):
    """Open the stage of a producer for a partition."""

    name: str
    producer: int
    query: str
    batch: int
    delayed: bool = False


class NameStages(Request):
    """Complete or publish stages, each given by (producer, number of rows)."""

    stages: list[tuple[int, int]]


class DropStages(Request):
    """Drop the stages of these producers."""

    producers: list[int]


class ForgetBatches(Request):
    """Forget the published batches of a query, up to and including this batch."""

    query: str
    batch: int


class ReadStage(Request):
    """Read rows of a stage, starting with row ``start``."""

    producer: int
    start: int


class StagePage(msgspec.Struct, array_like=True):
    """The subject of a stage, some of its frames, and the row at which the next page starts."""

    subject: str
    frames: list[bytes]
    end: int


#: The number of the stage's partition.
OPEN_STAGE = Operation("stage.open", OpenStage, int)
COMPLETE_STAGES = Operation[None]("stage.complete", NameStages)
PUBLISH_STAGES = Operation[None]("stage.publish", NameStages)
#: How many stages were dropped, or forgotten.
DROP_STAGES = Operation("stage.drop", DropStages, int)
FORGET_BATCHES = Operation("stage.forget", ForgetBatches, int)
READ_STAGE = Operation("stage.read", ReadStage, StagePage)
