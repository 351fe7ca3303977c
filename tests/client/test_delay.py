"""Delayed messages through the client: delivered once and never early; cancelled or rescheduled by receipt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

import plait
import plait.sync
from plait.client.admin import schedule_admin as schedule
from plait.testing import EmbeddedBroker
from tests.client.support import fetch_all, numbers

SECOND = timedelta(seconds=1)


@pytest.fixture
async def timed(timed_broker: EmbeddedBroker) -> AsyncIterator[plait.Client]:
    """A client that uses the clock of ``timed_broker``."""
    async with timed_broker.connect() as connected:
        yield connected


async def nothing(client: plait.Client, subject: str = "s") -> bool:
    async with client.reader(subject, start="earliest") as reader:
        return not await reader.fetch(10, wait=0)


async def everything(client: plait.Client, count: int, subject: str = "s") -> list[plait.Message]:
    """All messages of the subject; there must be ``count``."""
    async with client.reader(subject, start="earliest") as reader:
        found: list[plait.Message] = []
        async with asyncio.timeout(20):
            while len(found) < count:
                found += await reader.fetch(1000, wait=20)
        found += await reader.fetch(1000, wait=0)
        assert len(found) == count
        return found


# --- due times -----------------------------------------------------------------------------------------


async def test_a_message_is_delivered_when_due_with_all_its_fields(
    timed_broker: EmbeddedBroker, timed: plait.Client
) -> None:
    receipt = await timed.send("s", b"body", key="k", tags=["a"], headers={"n": 5}, delay=5)
    now = timed_broker.clock.now()
    assert (receipt.sequence, receipt.schedule, str(receipt.partition)) == (None, 0, "s@g1")
    assert receipt.deliver_at == datetime.fromtimestamp(now / 1e6, UTC) + 5 * SECOND
    async with timed.consumer("s", group="g") as consumer:
        await timed_broker.advance(4.999_999)
        assert len(await consumer.fetch(1, wait=0)) == 0
        await timed_broker.advance(0.000_001)
        [message] = await fetch_all(consumer, 1)
        assert (message.body, message.key, message.tags, message.headers) == (b"body", "k", ["a"], {"n": 5})
        assert message.message_id == receipt.message_id
        assert message.deliver_at == receipt.deliver_at
        assert message.store_time >= receipt.deliver_at
        assert message.send_time == receipt.deliver_at - 5 * SECOND
        assert (message.sequence, message.attempt) == (0, 1)
        message.ack()
    plain = await timed.send("s", b"plain")
    assert (plain.sequence, plain.schedule, plain.deliver_at) == (1, None, None)
    [_, undelayed] = await everything(timed, 2)
    assert undelayed.deliver_at is None


@pytest.mark.parametrize("compression", [None, "zstd"])
async def test_send_many_takes_one_delay_or_one_for_each_message(
    timed_broker: EmbeddedBroker, compression: Any
) -> None:
    async with plait.connect(timed_broker.address, compression=compression) as client:
        bodies = [b"%d" % n for n in range(2_000)]
        one = await client.send_many("one", bodies, keys=[f"k{n}" for n in range(2_000)], delay="5s")
        each = await client.send_many("each", bodies, delay=np.arange(2_000, 0, -1) / 100)
        assert [receipt.schedule for receipt in one] == list(range(2_000))
        assert len({receipt.deliver_at for receipt in one}) == 1
        first, last = each[0], each[-1]
        assert first.deliver_at is not None
        assert last.deliver_at is not None
        assert first.deliver_at - last.deliver_at == 19.99 * SECOND
        await timed_broker.advance(5)
        found = await everything(client, 2_000, "one")
        assert numbers(found) == list(range(2_000))
        assert [message.key for message in found] == [f"k{n}" for n in range(2_000)]
        assert numbers(await everything(client, 500, "each")) == list(range(1_999, 1_499, -1))
        await timed_broker.advance(15)
        found = await everything(client, 2_000, "each")
        assert numbers(found) == list(range(1_999, -1, -1))
        ids = {receipt.message_id: receipt.deliver_at for receipt in each}
        assert {message.message_id: message.deliver_at for message in found} == ids


async def test_posted_rows_keep_their_due_times(timed_broker: EmbeddedBroker, timed: plait.Client) -> None:
    tickets = [timed.post("s", b"%d" % n, delay=10 - n) for n in range(5)]
    with pytest.raises(plait.InvalidArgument, match="key '' is empty"):
        timed.post("s", b"bad", key="", delay=100)
    tickets += [timed.post("s", b"%d" % n, delay=10 - n) for n in range(5, 10)]
    plain = timed.post("s", b"10")
    await timed.flush()
    assert (await plain).sequence == 0
    receipts = [await ticket for ticket in tickets]
    assert [receipt.schedule for receipt in receipts] == list(range(10))
    for n in range(9, -1, -1):
        await timed_broker.advance(1)
        message = (await everything(timed, 11 - n))[-1]
        assert (message.body, message.message_id) == (b"%d" % n, receipts[n].message_id)


async def test_invalid_delays_are_refused_and_nothing_is_sent(timed: plait.Client) -> None:
    later = datetime.now(UTC)
    for wrong, message in [
        ({"delay": 0}, "cannot be delayed by 0; use 10 ms to 732 days"),
        ({"delay": 5, "deliver_at": later}, "give a delay or deliver_at, not both"),
        ({"deliver_at": datetime(2030, 1, 1)}, "has no time zone"),  # noqa: DTZ001 - that is the point
        ({"delay": timedelta(days=800)}, "use 10 ms to 732 days"),
    ]:
        with pytest.raises(plait.InvalidArgument, match=message):
            await timed.send("s", b"x", **wrong)  # type: ignore[arg-type]
        with pytest.raises(plait.InvalidArgument, match=message):
            timed.post("s", b"x", **wrong)  # type: ignore[arg-type]
        with pytest.raises(plait.InvalidArgument, match=message):
            await timed.send_many("s", [b"x"], **wrong)  # type: ignore[arg-type]
    with pytest.raises(plait.InvalidArgument, match="cannot be sent oneway"):
        await timed.send("s", b"x", delay=5, oneway=True)
    with pytest.raises(plait.InvalidName):
        await timed.send("bad name", b"x", delay=5)
    await timed.flush()
    assert [count for count in await timed.admin.schedule_counts() if count.count] == []


# --- cancelling and rescheduling ------------------------------------------------------------------------


async def test_a_cancelled_message_is_never_delivered(timed_broker: EmbeddedBroker, timed: plait.Client) -> None:
    receipts = [await timed.send("s", b"%d" % n, delay=5) for n in range(4)]
    assert [await timed.cancel(receipts[n]) for n in (1, 3)] == [True, True]
    assert await timed.cancel(receipts[1]) is False
    await timed_broker.advance(10)
    assert numbers(await everything(timed, 2)) == [0, 2]
    assert await timed.cancel(receipts[0]) is False


async def test_a_rescheduled_message_is_delivered_once_at_its_new_time(
    timed_broker: EmbeddedBroker, timed: plait.Client
) -> None:
    sooner = await timed.send("s", b"sooner", delay=100)
    later = await timed.send("s", b"later", key="k", delay=5)
    new = await timed.reschedule(sooner, delay=1)
    assert (new.message_id, new.partition, new.sequence) == (sooner.message_id, sooner.partition, None)
    assert (new.schedule, new.deliver_at) != (sooner.schedule, sooner.deliver_at)
    assert later.deliver_at is not None
    moved = await timed.reschedule(later, deliver_at=later.deliver_at + 10 * SECOND)
    assert moved.deliver_at == later.deliver_at + 10 * SECOND
    assert await timed.cancel(sooner) is False
    with pytest.raises(plait.NotScheduled, match="number 1 of 's' is not scheduled for"):
        await timed.reschedule(later, delay=1)
    await timed_broker.advance(1)
    [message] = await everything(timed, 1)
    assert (message.body, message.message_id) == (b"sooner", sooner.message_id)
    await timed_broker.advance(13.9)
    await everything(timed, 1)
    await timed_broker.advance(0.1)
    [_, message] = await everything(timed, 2)
    assert (message.body, message.key, message.message_id) == (b"later", "k", later.message_id)
    assert message.deliver_at == moved.deliver_at
    await timed_broker.advance(1000)
    await everything(timed, 2)
    with pytest.raises(plait.NotScheduled):
        await timed.reschedule(moved, delay=1)


async def test_only_scheduled_messages_can_be_cancelled(timed: plait.Client) -> None:
    plain = await timed.send("s", b"x")
    for call in (timed.cancel, timed.reschedule):
        with pytest.raises(plait.InvalidArgument, match="has no schedule number: it was not delayed"):
            await call(plain)
        with pytest.raises(plait.InvalidArgument, match="5 is not a receipt"):
            await call(5)  # type: ignore[arg-type]
    delayed = await timed.send("s", b"x", delay=5)
    with pytest.raises(plait.InvalidArgument, match="reschedule needs a new time"):
        await timed.reschedule(delayed)
    with pytest.raises(plait.InvalidArgument, match="give a delay or deliver_at, not both"):
        await timed.reschedule(delayed, delay=5, deliver_at=delayed.deliver_at)
    with pytest.raises(plait.InvalidArgument, match="use 10 ms to 732 days"):
        await timed.reschedule(delayed, delay=1e9)
    assert await timed.cancel(delayed)


# --- listing the schedule ----------------------------------------------------------------------


async def test_scheduled_messages_are_listed_and_counted(
    timed_broker: EmbeddedBroker, timed: plait.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "SCHEDULE_PAGE_MAX", 3)
    begun = datetime.fromtimestamp(timed_broker.clock.now() / 1e6, UTC)
    receipts = await timed.send_many(
        "s", [b"%d" % n for n in range(10)], keys=list("abcdefghij"), delay=list(range(10, 0, -1))
    )
    await timed.send("t", b"other", delay="2h")
    listed = await timed.admin.scheduled("s")
    assert [(m.number, m.key, m.deliver_at, m.message_id) for m in listed] == [
        (r.schedule, key, r.deliver_at, r.message_id) for r, key in zip(reversed(receipts), "jihgfedcba", strict=True)
    ]
    assert {m.subject for m in listed} == {"s"}
    assert len(await timed.admin.scheduled("s", limit=4)) == 4
    some = await timed.admin.scheduled("s", start=begun + 3 * SECOND, end=begun + 6 * SECOND)
    assert [m.key for m in some] == ["h", "g", "f"]
    assert await timed.cancel(some[0]) is True
    moved = await timed.reschedule(some[1], delay="1m")
    assert (moved.message_id, moved.partition.name) == (some[1].message_id, "s")

    async def counts(**how: Any) -> dict[object, int]:
        found = await timed.admin.schedule_counts(**how)
        return {count.subject if how.get("by") != "time" else count.time: count.count for count in found}

    assert await counts() == {"s": 9, "t": 1}
    assert await counts(subject="s") == {"s": 9}
    assert sum((await counts(subject="s", end=begun + 6 * SECOND)).values()) == 3
    by_time = await counts(by="time")
    assert sum(by_time.values()) == 10
    assert len(by_time) >= 2
    await timed_broker.advance(20)
    await everything(timed, 8)
    assert await counts() == {"s": 1, "t": 1}
    with pytest.raises(plait.InvalidArgument, match="by 'key' is not known"):
        await timed.admin.schedule_counts(by="key")  # type: ignore[arg-type]
    with pytest.raises(plait.InvalidArgument, match="limit must be 1 or more, not 0"):
        await timed.admin.scheduled("s", limit=0)
    with pytest.raises(plait.SubjectNotFound):
        await timed.admin.scheduled("none")


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_scheduled_messages_survive_restarts(timed_broker: EmbeddedBroker, timed: plait.Client, end: str) -> None:
    receipts = await timed.send_many("s", [b"%d" % n for n in range(10)], delay=5)
    assert await timed.cancel(receipts[3])
    moved = await timed.reschedule(receipts[4], delay=60)
    await getattr(timed_broker, end)()
    await timed_broker.start()
    assert await timed.cancel(receipts[5])
    await timed_broker.advance(5)
    assert numbers(await everything(timed, 7)) == [0, 1, 2, 6, 7, 8, 9]
    await getattr(timed_broker, end)()
    await timed_broker.start()
    await timed_broker.advance(55)
    found = await everything(timed, 8)
    assert (found[-1].body, found[-1].deliver_at) == (b"4", moved.deliver_at)


async def test_sends_in_flight_during_a_crash_are_scheduled_once(
    timed_broker: EmbeddedBroker, timed: plait.Client
) -> None:
    await timed.send("s", b"0", delay=5)
    sending = [asyncio.create_task(timed.send("s", b"%d" % n, delay=5)) for n in range(1, 50)]
    await asyncio.sleep(0)
    await timed_broker.kill()
    await timed_broker.start()
    receipts = await asyncio.gather(*sending)
    assert len({receipt.message_id for receipt in receipts}) == 49
    await timed_broker.advance(5)
    assert sorted(numbers(await everything(timed, 50))) == list(range(50))


async def test_deleting_a_subject_deletes_its_schedule(timed_broker: EmbeddedBroker, timed: plait.Client) -> None:
    receipt = await timed.send("s", b"old", delay=5)
    await timed.admin.delete_subject("s")
    with pytest.raises(plait.SubjectNotFound):
        await timed.cancel(receipt)
    again = await timed.send("s", b"new", delay=5)
    assert again.schedule is not None
    await timed_broker.advance(10)
    assert [message.body for message in await everything(timed, 1)] == [b"new"]


# --- the other ways to send -----------------------------------------------------------------------


async def test_apps_and_their_hooks_delay_too(broker: EmbeddedBroker, client: plait.Client) -> None:
    app = plait.App(broker.address, group="g")
    seen: list[tuple[object, object]] = []
    receipts: list[plait.Receipt] = []

    @app.subscriber("s")
    async def handle(message: plait.Message) -> None: ...

    @app.on_startup
    async def before() -> None:
        receipts.append(await app.send("s", b"without hooks", delay="1h"))
        receipts.append(await app.post("s", b"posted", delay="1h"))

        @app.around_send
        async def double(outgoing: plait.Outgoing, proceed: Any) -> plait.Receipt:
            seen.append((outgoing.delay, outgoing.deliver_at))
            outgoing.delay = 7200
            receipt: plait.Receipt = await proceed()
            return receipt

        receipts.append(await app.send("s", b"hooked", delay="1h"))
        app.stop()

    await app.run()
    assert seen == [("1h", None)]
    first, posted, hooked = (receipt.deliver_at for receipt in receipts)
    assert first is not None
    assert posted is not None
    assert hooked is not None
    assert abs(hooked - first - 3600 * SECOND) < 60 * SECOND
    assert sum(count.count for count in await client.admin.schedule_counts("s")) == 3


async def test_the_blocking_client_has_the_same_calls(broker: EmbeddedBroker) -> None:
    def work() -> None:
        with plait.sync.connect(broker.address) as client:
            one = client.send("s", b"1", delay="1h")
            two = client.post("s", b"2", key="k", tags=["t"], headers={"h": 1}, delay="2h").result()
            three, four = client.send_many("s", [b"3", b"4"], delay=["3h", "4h"])
            assert [receipt.schedule for receipt in (one, two, three, four)] == [0, 1, 2, 3]
            assert client.cancel(one) is True
            moved = client.reschedule(two, delay="5h")
            assert [m.message_id for m in client.admin.scheduled("s")] == [
                receipt.message_id for receipt in (three, four, moved)
            ]
            assert client.admin.schedule_counts("s") == [plait.ScheduleCount("s", None, 3)]
            [listed] = client.admin.scheduled("s", end="210m")
            assert client.admin.cancel_scheduled("s", listed.number, listed.deliver_at) is True
            assert four.schedule is not None
            assert four.deliver_at is not None
            now = datetime.now(UTC)
            client.admin.reschedule("s", four.schedule, four.deliver_at, to=now)
            with client.consumer("s", group="g") as consumer:
                [message] = consumer.fetch(1, wait=20)
                assert (message.body, message.deliver_at) == (b"4", now)
                message.ack()
            with pytest.raises(plait.InvalidArgument, match="not both"):
                client.post("s", b"x", delay=1, deliver_at=now)

    await asyncio.to_thread(work)


async def test_a_delay_passes_on_the_machine_clock(client: plait.Client) -> None:
    receipt = await client.send("s", b"x", delay=0.05)
    async with client.consumer("s", group="g") as consumer:
        [message] = await fetch_all(consumer, 1)
        assert receipt.deliver_at is not None
        assert datetime.now(UTC) >= message.store_time >= receipt.deliver_at
