"""The catalog: the partitions of a broker, as rows of partition 0 in the message log.

A frame names its partition by number. The catalog row that defines the number always precedes the frame in the log, and
each new segment begins with all catalog rows, so that one segment file can be read alone.
"""

from __future__ import annotations

import msgspec

from plait.frame.builder import FrameParts, assemble, body_column, pack_stamp
from plait.frame.columns import Codec, Column
from plait.frame.view import FrameView
from plait.model.settings import SubjectSettings
from plait.storage.logs.segment import HeaderRows, header_rows

#: The partition id of catalog frames.
CATALOG = 0
#: The most rows of one catalog frame: keeps it far below the size limit of a frame.
ROWS_MAX = 5_000
#: The kind of partitions that hold a subject's delayed rows until they are due.
SCHEDULE = "schedule"
#: The kind of partitions that hold the rows of one task of a batch, until the batch is committed.
STAGE = "stage"
#: The kind of partitions that hold due rows whose logical partition has moved to another partition, until that
#: partition has stored them.
FORWARD = "forward"
#: The kind of partitions that hold the half messages of a subject: rows of transactions that are not published yet.
HALF = "half"

#: Logical partitions [first, end).
Lps = tuple[int, int]
#: Logical partitions [first, end), and the sequence at which the partition was sealed for them.
Fence = tuple[int, int, int]
#: Logical partitions [first, end), the first sequence of their rows, and the route version that opened them.
Reopened = tuple[int, int, int, int]


class Stage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The producer, the batch and the state of a partition of kind ``STAGE``."""

    #: The only producer that writes to the stage. Its id is unique to the stage.
    producer: int
    #: The query and its batch: either all stages of a batch are published, or none.
    query: str
    batch: int
    #: The rows are delayed: each has a due time.
    delayed: bool = False
    #: "": the stage accepts rows.
    #: "publishing": the rows are being copied to the partition that consumers read.
    #: "moved": the keys have moved to other partitions, so the driver copies the rows there instead.
    #: "expired": the batch was not committed in time, and the rows are gone.
    state: str = ""


class Forward(msgspec.Struct, frozen=True):
    """The target partition of the rows in a partition of kind ``FORWARD``, and the producer that sends them."""

    producer: int
    #: The target partition and its broker group.
    name: str
    group: str
    #: Rows below this sequence are stored at the target.
    stored: int = 0


class PartitionRow(msgspec.Struct, frozen=True):
    """The definition of one partition. A later row replaces an earlier one."""

    id: int
    subject: str
    name: str
    created: int
    settings: SubjectSettings = SubjectSettings()
    deleted: bool = False
    #: "" for a partition that consumers read, else ``SCHEDULE``, ``STAGE``, ``FORWARD`` or ``HALF``.
    kind: str = ""
    #: The logical partitions whose rows the partition accepts; None: all.
    lps: list[Lps] | None = None
    #: The logical partitions that are sealed, with their fences.
    fences: list[Fence] = []
    #: The route version that set ``lps``.
    route: int = 0
    #: The first route version in which the partition accepts rows of any logical partition; 0: none yet.
    since: int = 0
    #: (sequence, the logical partitions whose rows the partition accepts from that sequence on), ascending. Rows
    #: without a key get one of these LPs.
    taken: list[tuple[int, list[Lps]]] = []
    #: Logical partitions that were opened after the partition was created, each with its first sequence and the route
    #: version that opened it.
    reopened: list[Reopened] = []
    #: For the kind ``STAGE``; ``name`` is then the partition that the rows are published to.
    stage: Stage | None = None
    #: For the kind ``FORWARD``; ``name`` is then the partition whose schedule had the rows.
    forward: Forward | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PartitionRow)


def catalog_frame(
    rows: list[PartitionRow], *, time: int, durable: int, epoch: int, previous_end: int = 0, padding: int = 0
) -> FrameParts:
    """A frame that defines partitions, with ``padding`` extra bytes.

    In a segment header ``previous_end`` is the end of the segment before.
    """
    columns = [body_column([_encoder.encode(row) for row in rows])]
    if padding:
        # Not zeros, because a scan concludes from a sector of zeros that it never reached the disk.
        columns.append((Column.NOTE, Codec.RAW, [b"\xff" * padding]))
    stamp = pack_stamp(CATALOG, 0, time, durable, epoch)
    return assemble(columns, count=len(rows), producer=0, first=1, previous=previous_end, flags=0, stamp=stamp)


def encode_catalog(rows: list[PartitionRow]) -> list[HeaderRows]:
    """Rows that define partitions, for a segment header (``HeaderRows.frame``)."""
    return header_rows([_encoder.encode(row) for row in rows], ROWS_MAX)


def read_rows(frame: FrameView) -> list[PartitionRow]:
    return [_decoder.decode(row) for row in frame.binary(Column.BODY).to_pylist()]
