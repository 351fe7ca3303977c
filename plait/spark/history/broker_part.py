"""The part of a subject's history that is read through brokers: from the end of the archive to the end of each
partition at the time of planning.

The sequences of a partition that was deleted and created again restart at 0. Its rows are later than all archived rows,
so a row counts as archived only if both its sequence and its store time are within the archived part.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from plait.client.blocking.loop_thread import shared_loop
from plait.client.client import Client
from plait.client.read.read_position import ReadPosition
from plait.client.types import PartitionName
from plait.errors import SubjectNotFound, Unavailable
from plait.frame.view import FrameView
from plait.spark.history.live_part import matching_rows
from plait.spark.history.selection import HistorySelection
from plait.storage.reading.log_chunks import ChunkPartition

log = logging.getLogger("plait.spark")

#: Rows of one read request; the client's limits bound their size.
READ_COUNT = 65_536
#: A broker that returns no rows is asked again this often, and waits this long each time, before the missing rows count
#: as lost.
STALLS_MAX = 3
STALL_SECONDS = 1.0
#: How far a broker's clock may have been set back without a search by time missing rows.
CLOCK_MICROS = 3_600_000_000


@dataclass(frozen=True)
class ArchivedUpTo:
    """The archived part of a partition: everything before a sequence, up to a store time."""

    next: int
    time_max: int


@dataclass(frozen=True)
class BrokerPart:
    """Rows [start, end) of a partition; read with a separate client."""

    address: str
    subject: str
    partition: PartitionName
    start: int
    end: int
    archived: ArchivedUpTo | None

    @property
    def size(self) -> int:
        return self.end - self.start

    def read(self, selection: HistorySelection, *, encoded: bool = False, files: object = None) -> Iterator[pa.Table]:
        """The matching rows. ``encoded`` adds a column with the headers as in the frames."""
        group = self.partition.group
        for rows in matching_rows(self._frames(), selection, group, encoded=encoded):
            sequences = rows["sequence"]
            wanted = pc.less(sequences, self.end)
            if self.archived is not None:
                times = rows["store_time"].cast(pa.int64())
                later = pc.or_(
                    pc.greater_equal(sequences, self.archived.next), pc.greater(times, self.archived.time_max)
                )
                wanted = pc.and_(wanted, later)
            rows = rows.filter(wanted)
            if rows.num_rows:
                yield rows

    def _frames(self) -> Iterator[tuple[ChunkPartition, FrameView]]:
        partition = ChunkPartition(self.subject, self.partition.name)
        loop = shared_loop()
        client = Client(self.address)
        loop.run(client.open())
        try:
            cursor = loop.run(_cursor(client, self.subject, self.partition, ["sequence", self.start]))
            stalls = 0
            while cursor.position[1] < self.end and stalls < STALLS_MAX:
                before = cursor.position[1]
                frames = loop.run(cursor.read_frames(READ_COUNT, STALL_SECONDS if stalls else 0.0))
                for frame in frames:
                    yield partition, frame
                # A broker under flow control returns nothing; so does one that lost the tail of its log.
                stalls = 0 if frames or cursor.position[1] > before else stalls + 1
            if cursor.position[1] < self.end:
                self._explain(cursor.position[1], loop.run(_position(client, self.subject, self.partition, "latest")))
        finally:
            loop.run(client.close())

    def _explain(self, reached: int, latest: int) -> None:
        """Raise ``Unavailable`` if the missing rows exist at the broker; warn if they are lost."""
        if latest > reached:
            raise Unavailable(
                f"{self.partition} has messages up to sequence {latest - 1}, but its broker did not send those from "
                f"{reached} on: it is too busy; try again"
            )
        log.warning(
            "%s ends at sequence %d: sequences %d to %d, which existed when the lookup was planned, are lost",
            self.partition,
            latest,
            reached,
            self.end - 1,
        )


def plan_server(
    address: str, selection: HistorySelection, archived: Mapping[str, ArchivedUpTo]
) -> list[BrokerPart] | None:
    """The rows that the brokers have and the archive does not, as of now; None: the cluster has no such subject."""
    return shared_loop().run(_plan(address, selection, archived))


async def _plan(
    address: str, selection: HistorySelection, archived: Mapping[str, ArchivedUpTo]
) -> list[BrokerPart] | None:
    subject = selection.subject
    async with Client(address) as client:
        try:
            route = await client._router.refresh(subject, create=False)
        except SubjectNotFound:
            return None
        pieces = []
        for name in route.partitions:
            known = archived.get(str(name))
            start = await _start(client, subject, name, known)
            end = await _position(client, subject, name, "latest")
            if selection.time_min > CLOCK_MICROS:
                since = await _position(client, subject, name, ["time", selection.time_min - CLOCK_MICROS])
                start = max(start, min(since, end))
            if start < end:
                pieces.append(BrokerPart(address, subject, name, start, end, known))
    return pieces


async def _start(client: Client, subject: str, name: PartitionName, archived: ArchivedUpTo | None) -> int:
    """The first sequence that may not be archived."""
    if archived is None:
        return await _position(client, subject, name, "earliest")
    later = await _position(client, subject, name, ["time", archived.time_max])
    return min(later, await _position(client, subject, name, ["sequence", archived.next]))


async def _position(client: Client, subject: str, name: PartitionName, start: object) -> int:
    cursor = await _cursor(client, subject, name, start)
    await cursor.fix()
    return int(cursor.position[1])


async def _cursor(client: Client, subject: str, name: PartitionName, start: object) -> ReadPosition:
    route = await client._router.route(subject, create=False)
    return ReadPosition(client._router.node(route, name.group), client.limits, subject, name, start)
