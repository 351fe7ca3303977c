"""Scans of partition ranges: their spans and cuts, and every row once and in order."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

import plait
from plait.broker.partitions.partition import Partition, ReadBatch
from plait.client.read import range_scan as scan_module
from plait.client.read.range_scan import RangeScan, ScanPiece
from plait.client.read.surveyor import PartitionSpan, SpanRange, Surveyor
from plait.client.types import PartitionName
from plait.errors import DataLost, InvalidArgument, SubjectNotFound, Unavailable
from plait.frame.columns import Column
from plait.testing import EmbeddedBroker
from plait.wire import messages as m
from tests.client.support import EAGER, PlayedMeta

ORDERS = PartitionName("orders", "g1")


@pytest.fixture
async def surveyor(broker: EmbeddedBroker) -> AsyncIterator[Surveyor]:
    async with Surveyor([broker.address], EAGER) as opened:
        yield opened


@pytest.fixture(autouse=True)
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "READ_SIZE", 2_000)


async def send(client: plait.Client, count: int) -> list[bytes]:
    """Send ``count`` messages in frames of ten."""
    bodies = [b"%d " % number + bytes(90) for number in range(count)]
    for start in range(0, count, 10):
        await client.send_many("orders", bodies[start : start + 10])
    return bodies


async def span_of(surveyor: Surveyor) -> PartitionSpan:
    (span,) = await surveyor.spans(await surveyor.find(["orders"]))
    return span


def rows_of(pieces: list[ScanPiece]) -> list[bytes]:
    return [
        row for piece in pieces for frame in piece.frames for row in frame.verify().rows(Column.BODY, 0, frame.count)
    ]


async def test_a_span_covers_the_stored_rows_of_a_partition(client: plait.Client, surveyor: Surveyor) -> None:
    await send(client, 20)
    span = await span_of(surveyor)
    assert (span.place, span.subject, span.start, span.end, span.epochs) == (ORDERS, "orders", 0, 20, [(0, 1)])
    assert [span.epoch_at(0), span.first_after(0), span.first_after(1)] == [1, 0, 20]


async def test_ranges_are_measured_and_cut(client: plait.Client, surveyor: Surveyor) -> None:
    await send(client, 100)
    await surveyor.find(["orders"])
    whole, part = SpanRange(ORDERS, 0, 100), SpanRange(ORDERS, 10, 20)
    sizes = [cuts.size for cuts in await surveyor.cuts([whole, part], 0)]
    assert sizes[0] == pytest.approx(10 * sizes[1], rel=0.05)
    (cuts,) = await surveyor.cuts([whole], sizes[0] // 4)
    assert [end % 10 for end in cuts.ends] == [0] * len(cuts.ends)
    assert len(cuts.ends) in (4, 5)
    reached = await surveyor.reach([whole, part], [sizes[1] * 3, 1])
    assert [cuts.ends for cuts in reached] == [[30], [20]]
    beyond = await surveyor.cuts([SpanRange(ORDERS, 200, 300)], 1)
    assert [(cuts.size, cuts.ends) for cuts in beyond] == [(0, [])]


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("partition.spans", {"names": ["a b"]}),
        ("partition.spans", {"names": "orders"}),
        ("partition.spans", {"names": [], "more": 1}),
        ("partition.cuts", {"ranges": [["orders", -1, 5, 1]]}),
        ("partition.cuts", {"ranges": [["orders", 0, 5, -1]]}),
        ("partition.cuts", {"ranges": [["orders", 0, 5]]}),
    ],
)
async def test_invalid_requests_are_refused(
    client: plait.Client, surveyor: Surveyor, operation: str, arguments: dict[str, object]
) -> None:
    await send(client, 10)
    await surveyor.find(["orders"])
    with pytest.raises(InvalidArgument):
        await surveyor.node(ORDERS).request(m.AdminRequest(operation, arguments))


async def test_a_missing_subject_is_not_created(client: plait.Client, surveyor: Surveyor) -> None:
    with pytest.raises(SubjectNotFound):
        await surveyor.find(["nothing"])
    with pytest.raises(SubjectNotFound, match="there are no subjects"):
        await surveyor.find([], [""])
    assert await client.admin.subjects() == []


async def test_every_row_of_a_range_is_read_once_and_in_order(client: plait.Client, surveyor: Surveyor) -> None:
    sent = await send(client, 500)
    span = await span_of(surveyor)
    pieces = [piece async for piece in RangeScan(surveyor, span, 0, 500)]
    assert len(pieces) > 20
    assert rows_of(pieces) == sent
    assert [gap for piece in pieces for gap in piece.gaps] == []
    assert rows_of([piece async for piece in RangeScan(surveyor, span, 123, 234)]) == sent[123:234]


async def test_the_number_of_concurrent_reads_is_limited(
    broker: EmbeddedBroker, client: plait.Client, surveyor: Surveyor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await send(client, 500)
    span = await span_of(surveyor)
    open_reads: list[int] = []
    under_way = 0
    read = RangeScan._read

    async def watched(self: RangeScan, start: int, end: int, size: int) -> object:
        nonlocal under_way
        under_way += 1
        open_reads.append(under_way)
        try:
            return await read(self, start, end, size)
        finally:
            under_way -= 1

    monkeypatch.setattr(RangeScan, "_read", watched)
    async for _ in RangeScan(surveyor, span, 0, 500):
        pass
    assert max(open_reads) == scan_module.AHEAD


async def test_a_scan_that_ends_early_leaves_no_task_running(client: plait.Client, surveyor: Surveyor) -> None:
    await send(client, 500)
    pieces = aiter(RangeScan(surveyor, await span_of(surveyor), 0, 500))
    await anext(pieces)
    await pieces.aclose()  # type: ignore[attr-defined]
    assert [task for task in asyncio.all_tasks() if task.get_name() == "plait-scan"] == []


async def test_a_scan_continues_after_a_broker_crash(
    broker: EmbeddedBroker, client: plait.Client, surveyor: Surveyor
) -> None:
    sent = await send(client, 500)
    pieces = []
    async for piece in RangeScan(surveyor, await span_of(surveyor), 0, 500):
        pieces.append(piece)
        if len(pieces) in (3, 9):
            await broker.kill()
            await broker.start()
    assert rows_of(pieces) == sent


async def test_rows_that_a_broker_has_and_does_not_return_are_an_error(
    broker: EmbeddedBroker, client: plait.Client, surveyor: Surveyor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await send(client, 20)
    span = await span_of(surveyor)
    read, empty = broker.server.broker.read, 3

    def busy(
        partition: Partition,
        sequence: int,
        count: int,
        size: int,
        wait: float,
        reply: Callable[..., None],
        wanted: None,
    ) -> None:
        nonlocal empty
        empty -= 1
        if empty >= 0:
            reply(ReadBatch(sequence))
        else:
            read(partition, sequence, count, size, wait, reply, wanted)

    monkeypatch.setattr(broker.server.broker, "read", busy)
    assert len(rows_of([piece async for piece in RangeScan(surveyor, span, 0, 20)])) == 20
    empty = sys.maxsize
    surveyor.limits = msgspec.structs.replace(surveyor.limits, send_seconds=0.05)
    with pytest.raises(Unavailable, match="returned none of them within"):
        [piece async for piece in RangeScan(surveyor, span, 0, 20)]


async def test_a_range_past_the_end_of_the_partition_is_refused_without_waiting(
    client: plait.Client, surveyor: Surveyor
) -> None:
    await send(client, 20)
    with pytest.raises(DataLost, match="orders@g1 ends at sequence 20, but had 20 to 29"):
        async for _ in RangeScan(surveyor, await span_of(surveyor), 10, 30):
            pass


@pytest.mark.parametrize(("kept_from", "end"), [(305, 500), (320, 500), (485, 497), (500, 500)])
async def test_rows_that_expire_during_a_scan_are_a_gap_and_the_rest_is_read_once(
    broker: EmbeddedBroker,
    client: plait.Client,
    surveyor: Surveyor,
    monkeypatch: pytest.MonkeyPatch,
    kept_from: int,
    end: int,
) -> None:
    sent = await send(client, 500)
    planned = RangeScan._pieces

    async def expiring(self: RangeScan) -> object:
        pieces = await planned(self)
        broker.server.broker.subjects["orders"].start = kept_from
        return pieces

    monkeypatch.setattr(RangeScan, "_pieces", expiring)
    pieces = [piece async for piece in RangeScan(surveyor, await span_of(surveyor), 0, end)]
    assert rows_of(pieces) == sent[kept_from:end]
    gaps = [gap for piece in pieces for gap in piece.gaps]
    assert [sequence for gap in gaps for sequence in range(gap.start, gap.end)] == list(range(min(kept_from, end)))
    assert all(gap.expired for gap in gaps)


async def test_damaged_rows_are_a_gap_and_the_rest_is_read_once(
    broker: EmbeddedBroker, client: plait.Client, surveyor: Surveyor
) -> None:
    sent = await send(client, 500)
    span = await span_of(surveyor)
    await broker.stop()
    for segment in (broker.data / "message").iterdir():
        content = segment.read_bytes()
        segment.write_bytes(content.replace(sent[255], bytes(len(sent[255]))))
    await broker.start()
    pieces = [piece async for piece in RangeScan(surveyor, span, 0, 495)]
    assert rows_of(pieces) == sent[:250] + sent[260:495]
    assert [gap for piece in pieces for gap in piece.gaps] == [(250, 260, False)]


async def test_a_missing_partition_is_refused_by_name(surveyor: Surveyor) -> None:
    with pytest.raises(DataLost, match="orders#7@g1 is not a partition of its subject"):
        await surveyor.spans([PartitionName("orders#7", "g1")])


async def test_times_are_found_in_a_partition_whose_rows_are_all_expired(
    broker: EmbeddedBroker, client: plait.Client
) -> None:
    await send(client, 20)
    partition = broker.server.broker.subjects["orders"]
    broker.server.broker.snapshots.make()
    await send(client, 60)
    # The last rows are not visible yet.
    partition.start = partition.visible = 20
    spans = await client._router.meta.request(
        m.AdminRequest("partition.spans", {"names": ["orders"], "times": [0, 1 << 62]})
    )
    (span,) = msgspec.msgpack.decode(spans.result)
    assert (span["at"], span["until"]) == ([20, 20], [20, 20])


async def test_an_unreachable_broker_is_named_in_the_error(broker: EmbeddedBroker, client: plait.Client) -> None:
    limits = plait.ClientLimits(request_seconds=0.1, send_seconds=0.1)
    await send(client, 10)
    async with Surveyor([broker.address], limits) as surveyor:
        await surveyor.find(["orders"])
        await broker.kill()
        with pytest.raises(Unavailable, match=r"plait://127\.0\.0\.1"):
            await surveyor.spans([ORDERS])


async def test_each_partition_is_read_from_its_own_broker(meta: PlayedMeta) -> None:
    async with meta.client(limits=EAGER) as client:
        keys = [f"k{number}" for number in range(40)]
        await client.send_many("s", [key.encode() for key in keys], keys=keys)
        surveyor = Surveyor([meta.brokers[0].address], EAGER)
        surveyor._router.find = client._router.find  # type: ignore[method-assign]
        async with surveyor:
            places = await surveyor.find(["s"])
            spans = await surveyor.spans(places)
            assert [str(span.place) for span in spans] == ["s@g1", "s#1@g2"]
            assert sum(span.end for span in spans) == 40
            cuts = await surveyor.cuts([SpanRange(span.place, 0, span.end) for span in reversed(spans)], 1)
            assert [found.ends[-1] for found in cuts] == [span.end for span in reversed(spans)]
            rows = [rows_of([p async for p in RangeScan(surveyor, span, 0, span.end)]) for span in spans]
            assert sorted(rows[0] + rows[1]) == sorted(key.encode() for key in keys)
