"""Which partitions there are: rows of partition 0, kept in the message log itself.

A frame names its partition by number; the catalog row that defines the number always stands before it in the log, and
each new segment starts with all rows again, so that one segment file can be read alone.
"""

from __future__ import annotations

import msgspec

from plait.frame.builder import FrameParts, assemble, body_column
from plait.frame.columns import Codec, Column
from plait.frame.header import pack_stamp
from plait.frame.view import FrameView
from plait.storage.logs.header_rows import HeaderRows, head_rows

#: The partition id of catalog frames.
CATALOG = 0
#: Rows of one frame: keeps it far below the limit of a frame's size.
ROWS_MAX = 5_000
#: The kind of partitions that hold a subject's delayed rows until they are due.
SCHEDULE = "schedule"
#: The kind of partitions that hold what one task of a batch wrote, until the batch is committed.
STAGE = "stage"
#: The kind of partitions that hold delayed rows which became due after their logical partition had moved to another
#: partition, until that one has stored them.
FORWARD = "forward"


class SubjectSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a user may set per subject; None: the server's default."""

    #: Messages older than this may go.
    retention_seconds: float | None = None
    #: Of the newest messages, at least this much is kept.
    retention_bytes: int | None = None
    #: "best_tried" or "strict": what a failure does to the order of its key.
    order: str = "best_tried"


#: Logical partitions [first, end).
Lps = tuple[int, int]
#: The same, with the sequence at which the partition was closed to them.
Fence = tuple[int, int, int]
#: The same, with the sequence from which on the partition took them and the version of the route that said so.
Reopened = tuple[int, int, int, int]


class Stage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whose rows a partition of kind ``STAGE`` holds, and what has become of them."""

    #: The only one that writes to it; nobody else has this number.
    producer: int
    #: A batch of a query: all stages of it are published, or none.
    query: str
    batch: int
    #: Its rows are to be delivered at times of their own.
    delayed: bool = False
    #: "": rows may come; "publishing": they are on their way to where consumers find them; "moved": they are not to be
    #: published here, as their keys have moved, and are there to be copied; "expired": nobody asked for them in time,
    #: and they are gone.
    state: str = ""


class Forward(msgspec.Struct, frozen=True):
    """Where the rows of a partition of kind ``FORWARD`` are sent, and by which producer."""

    producer: int
    #: The partition and the broker group that has it.
    name: str
    group: str
    #: Rows below this are stored there.
    stored: int = 0


class PartitionRow(msgspec.Struct, frozen=True):
    """One partition, as last defined."""

    id: int
    subject: str
    name: str
    created: int
    settings: SubjectSettings = SubjectSettings()
    deleted: bool = False
    #: What it is to its subject: "" is where consumers find its messages.
    kind: str = ""
    #: The logical partitions that it takes rows of; None: all.
    lps: list[Lps] | None = None
    #: Those that it took once, and where their rows end.
    fences: list[Fence] = []
    #: The version of the route that said so.
    route: int = 0
    #: The version of the route that first said that it takes any; 0: none has.
    since: int = 0
    #: What it took from each of these sequences on, the first of them first: rows without keys are of one of those.
    taken: list[tuple[int, list[Lps]]] = []
    #: Those that it took later than from its beginning on, where their rows begin then, and by which route.
    reopened: list[Reopened] = []
    #: Of the kind ``STAGE``; its name is that of the partition that its rows are for.
    stage: Stage | None = None
    #: Of the kind ``FORWARD``; its name is that of the partition in whose schedule the rows were.
    forward: Forward | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PartitionRow)


def catalog_frame(
    rows: list[PartitionRow], *, time: int, durable: int, epoch: int, previous_end: int = 0, padding: int = 0
) -> FrameParts:
    """A frame that defines partitions, longer by ``padding`` bytes than it has to be.

    At the head of a segment it says where the one before ended.
    """
    columns = [body_column([_encoder.encode(row) for row in rows])]
    if padding:
        # No zeros: a scan takes a sector of zeros for one that never reached the disk.
        columns.append((Column.NOTE, Codec.RAW, [b"\xff" * padding]))
    stamp = pack_stamp(CATALOG, 0, time, durable, epoch)
    return assemble(columns, count=len(rows), producer=0, first=1, previous=previous_end, flags=0, stamp=stamp)


def encode_catalog(rows: list[PartitionRow]) -> list[HeaderRows]:
    """Rows that define partitions, for the head of a segment (``HeaderRows.frame``)."""
    return head_rows([_encoder.encode(row) for row in rows], ROWS_MAX)


def read_rows(frame: FrameView) -> list[PartitionRow]:
    """The partitions that a catalog frame defines."""
    return [_decoder.decode(row) for row in frame.binary(Column.BODY).to_pylist()]
