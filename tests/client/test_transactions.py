"""Transactions through the client: blocks that commit or roll back, checks, administration, routes and faults."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

import plait
import plait.sync
from plait.client.transactions.half_sender import HalfSender
from plait.limits import ServerLimits
from plait.testing import BlockingBroker, EmbeddedBroker, ManualClock
from plait.testing.embedded_broker import TEST_CONFIG
from plait.wire.link import Link
from tests.client.support import EAGER, fetch_all, until
from tests.client.test_expanding import settled
from tests.support.cancelling import every_step


class Answers:
    """A check that records its calls."""

    def __init__(self, outcome: str = "unknown") -> None:
        self.outcome = outcome
        self.asked: list[plait.TransactionInfo] = []

    async def __call__(self, transaction: plait.TransactionInfo) -> str:
        self.asked.append(transaction)
        return self.outcome


@pytest.fixture
async def timed(timed_broker: EmbeddedBroker) -> AsyncIterator[plait.Client]:
    async with timed_broker.connect(limits=EAGER) as connected:
        yield connected


async def bodies(client: plait.Client, count: int, subject: str = "s") -> list[bytes]:
    """All messages of the subject; there must be ``count``."""
    async with client.reader(subject, start="earliest") as reader:
        found: list[bytes] = []
        async with asyncio.timeout(20):
            while len(found) < count:
                found += [each.body for each in await reader.fetch(100, wait=20)]
        found += [each.body for each in await reader.fetch(100, wait=0)]
    assert len(found) == count
    return found


async def decided(client: plait.Client) -> None:
    """Wait until no transaction is undecided."""
    async with asyncio.timeout(20):
        while await client.admin.transactions():  # noqa: ASYNC110 - it asks the broker
            await asyncio.sleep(0)


# --- blocks ---------------------------------------------------------------------------------------


async def test_leaving_the_block_commits(client: plait.Client):
    async with client.transaction("shop") as tx:
        receipt = await tx.send("s", {"n": 1}, key="k", tags=["new"], headers={"amount": 5})
        await tx.send("t", b"other")
        assert (receipt.sequence, receipt.schedule, str(receipt.partition)) == (None, None, "s@g1")
        assert await bodies(client, 0) == []
        assert tx.state == "open"
    assert tx.state == "committed"
    async with client.reader("s", start="earliest") as reader:
        [message] = await reader.fetch(10, wait=20)
    assert (message.body, message.key, message.tags, message.headers) == (b'{"n":1}', "k", ["new"], {"amount": 5})
    assert message.message_id == receipt.message_id
    assert message.deliver_at is None
    assert await bodies(client, 1, "t") == [b"other"]


async def test_an_exception_rolls_back_and_is_raised(client: plait.Client):
    tx = client.transaction("shop")

    async def work() -> None:
        async with tx:
            await tx.send("s", b"a")
            raise RuntimeError("no stock")

    with pytest.raises(RuntimeError, match="no stock"):
        await work()
    assert tx.state == "rolled back"
    assert await client.admin.transactions() == []
    assert await bodies(client, 0) == []


async def test_a_cancelled_block_rolls_back(client: plait.Client):
    sent = asyncio.Event()

    async def work() -> None:
        async with client.transaction("shop") as tx:
            await tx.send("s", b"a")
            sent.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await sent.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await client.admin.transactions() == []


async def test_commit_and_rollback_by_hand(client: plait.Client):
    async with client.transaction("shop") as one:
        await one.send("s", b"a")
        await one.commit()
        with pytest.raises(plait.TransactionDecided, match="is committed; begin another one"):
            await one.send("s", b"late")
    async with client.transaction("shop") as two:
        await two.send("s", b"b")
        await two.rollback()
        with pytest.raises(plait.TransactionDecided):
            await two.commit()
    assert await bodies(client, 1) == [b"a"]


async def test_a_block_without_messages_contacts_no_broker(client: plait.Client):
    async with client.transaction("shop"):
        pass
    assert await client.admin.transactions() == []


async def test_concurrent_sends_of_a_transaction_keep_their_order(client: plait.Client):
    async with client.transaction("shop") as tx:
        await asyncio.gather(*(tx.send("s", b"%d" % n) for n in range(20)))
    assert await bodies(client, 20) == [b"%d" % n for n in range(20)]


async def test_delays_count_from_the_send(timed_broker: EmbeddedBroker, timed: plait.Client):
    async with timed.transaction("shop") as tx:
        await tx.send("s", b"later", delay=60)
        await tx.send("s", b"now")
        await timed_broker.advance(1)
    await timed_broker.advance(1)
    assert await bodies(timed, 1) == [b"now"]
    await timed_broker.advance(59)
    assert await bodies(timed, 2) == [b"now", b"later"]


async def test_mistakes_are_refused_and_the_transaction_can_continue(client: plait.Client):
    with pytest.raises(plait.InvalidName):
        client.transaction("no/name")
    with pytest.raises(plait.InvalidArgument):
        client.transaction_checks("shop", 5)  # type: ignore[arg-type]
    async with client.transaction("shop") as tx:
        with pytest.raises(plait.InvalidArgument):
            await tx.send("s", b"a", key="")
        with pytest.raises(plait.InvalidArgument):
            await tx.send("no/name", b"a")
        await tx.send("s", b"a")
    assert await bodies(client, 1) == [b"a"]


async def test_a_full_table_refuses_to_begin(tmp_path: Path):
    config = msgspec.structs.replace(TEST_CONFIG, limits=ServerLimits(transactions=1))
    async with EmbeddedBroker(tmp_path / "data", config=config) as broker, broker.connect() as client:
        async with client.transaction("shop") as one:
            await one.send("s", b"a")
            with pytest.raises(plait.LimitExceeded, match="limit `transactions` of the broker: 1"):
                async with client.transaction("shop") as two:
                    await two.send("s", b"b")
        assert await bodies(client, 1) == [b"a"]


# --- checks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outcome", "count"), [("commit", 1), ("rollback", 0)])
async def test_a_check_decides_what_a_lost_producer_left(
    timed_broker: EmbeddedBroker, timed: plait.Client, outcome: str, count: int
):
    answers = Answers(outcome)
    async with timed_broker.connect() as lost:
        tx = await lost.transaction("shop").__aenter__()
        await tx.send("s", b"a", key="order-1", headers={"n": 1})
    timed.transaction_checks("shop", answers)
    await timed_broker.advance(5.9)
    assert not answers.asked
    await timed_broker.advance(0.2)
    await until(lambda: answers.asked)
    [asked] = answers.asked
    [message] = asked.messages
    assert (asked.id, asked.producer_group, asked.count, asked.subjects) == (tx.id, "shop", 1, ["s"])
    assert (message.subject, message.body, message.key, message.headers) == ("s", b"a", "order-1", {"n": 1})
    await decided(timed)
    await timed_broker.advance(1)
    assert await bodies(timed, count) == [b"a"][:count]


async def test_a_check_may_be_blocking_and_may_fail(timed_broker: EmbeddedBroker, timed: plait.Client):
    outcomes = ["boom", "nonsense", "commit"]
    asked: list[str] = []

    def check(transaction: plait.TransactionInfo) -> str:
        asked.append(transaction.id)
        outcome = outcomes[len(asked) - 1]
        if outcome == "boom":
            raise RuntimeError("the database is down")
        return outcome

    tx = await timed.transaction("shop", check=check).__aenter__()  # type: ignore[arg-type]
    await tx.send("s", b"a")
    for count in range(1, 4):
        await timed_broker.advance(31)
        await until(lambda count=count: len(asked) == count)
    await decided(timed)
    await timed_broker.advance(1)
    assert await bodies(timed, 1) == [b"a"]
    with pytest.raises(plait.TransactionDecided, match="was committed before"):
        await tx.rollback()
    assert tx.state == "committed"


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_check_that_hangs_holds_up_no_other_check(timed_broker: EmbeddedBroker, blocking: bool):
    ended, asked = threading.Event(), []

    def answer(transaction: plait.TransactionInfo) -> str:
        asked.append(transaction.id)
        if transaction.id == hanging.id and blocking:
            ended.wait(60)
        return "rollback"

    async def hang(transaction: plait.TransactionInfo) -> str:
        outcome = answer(transaction)
        if transaction.id == hanging.id:
            await asyncio.Event().wait()
        return outcome

    async with timed_broker.connect(limits=msgspec.structs.replace(EAGER, check_seconds=0.01)) as client:
        hanging, other = client.transaction("shop"), client.transaction("shop")
        await (await hanging.__aenter__()).send("s", b"a")
        client.transaction_checks("shop", answer if blocking else hang)  # type: ignore[arg-type]
        await timed_broker.advance(7)
        await until(lambda: hanging.id in asked)
        await (await other.__aenter__()).send("s", b"b")
        await timed_broker.advance(7)
        await until(lambda: other.id in asked)
        ended.set()


async def test_a_restarted_broker_asks_again(tmp_path: Path):
    clock = ManualClock()
    answers = Answers("commit")
    async with EmbeddedBroker(tmp_path / "data", clock=clock) as broker:
        async with broker.connect() as client:
            tx = await client.transaction("shop").__aenter__()
            await tx.send("s", b"a")
        await broker.restart()
        async with broker.connect() as client:
            client.transaction_checks("shop", answers)
            await broker.advance(7)
            await until(lambda: answers.asked)
            await decided(client)
            await broker.advance(1)
            assert await bodies(client, 1) == [b"a"]


# --- administration -------------------------------------------------------------------------------


async def test_an_operator_lists_shows_and_decides(timed_broker: EmbeddedBroker, timed: plait.Client):
    one = await timed.transaction("shop").__aenter__()
    await one.send("s", b"a", key="k")
    await one.send("t", b"b")
    two = await timed.transaction("bank").__aenter__()
    await two.send("s", b"c")
    listed = await timed.admin.transactions()
    assert {(each.id, each.producer_group, each.state, each.count, each.group) for each in listed} == {
        (one.id, "shop", "open", 2, "g1"),
        (two.id, "bank", "open", 1, "g1"),
    }
    assert await timed.admin.transactions(state="parked") == []
    [only] = await timed.admin.transactions(producer_group="bank")
    assert only.id == two.id
    shown = await timed.admin.transaction(one.id)
    assert [(each.subject, each.body) for each in shown.messages] == [("s", b"a"), ("t", b"b")]
    await timed.admin.commit_transaction(one.id)
    await timed.admin.rollback_transaction(two.id)
    await timed_broker.advance(1)
    assert await bodies(timed, 1) == [b"a"]
    with pytest.raises(plait.TransactionDecided):
        await timed.admin.rollback_transaction(one.id)
    with pytest.raises(plait.TransactionNotFound, match="rolled back; list the undecided ones"):
        await timed.admin.transaction(two.id)
    with pytest.raises(plait.TransactionNotFound):
        await timed.admin.commit_transaction("00000000000000ab")
    with pytest.raises(plait.InvalidArgument, match="16 hexadecimal digits"):
        await timed.admin.commit_transaction("17")


# --- routes ---------------------------------------------------------------------------------------


async def test_messages_follow_the_route_that_changes_while_a_transaction_is_open(nodes: list[EmbeddedBroker]):
    async with nodes[0].connect(limits=EAGER) as client:
        await client.admin.create_subject("s", partitions=1, groups=["g1"])
        keys = [f"k{n}" for n in range(12)]
        async with client.consumer("s", group="g", ordered=True) as consumer:
            async with client.transaction("shop") as tx:
                for key in keys[:6]:
                    await tx.send("s", key.encode(), key=key)
                await client.admin.expand_subject("s", ["s@g1", "s@g2"])
                await settled(client, "s")
                for key in keys[6:]:
                    await tx.send("s", key.encode(), key=key)
            messages = await fetch_all(consumer, len(keys))
            assert sorted(each.body.decode() for each in messages) == sorted(keys)
            assert {str(each.partition) for each in messages} == {"s@g1", "s@g2"}
            for message in messages:
                await message.ack()


async def test_a_subject_that_left_the_broker_group_is_refused(nodes: list[EmbeddedBroker]):
    async with nodes[0].connect(limits=EAGER) as client:
        await client.admin.create_subject("s", partitions=1, groups=["g1"])
        await client.admin.create_subject("t", partitions=1, groups=["g2"])
        async with client.transaction("shop") as tx:
            await tx.send("s", b"a")
            with pytest.raises(
                plait.TransactionSpansGroups, match="'t' has no partition on broker group 'g1'"
            ) as caught:
                await tx.send("t", b"b")
            assert caught.value.details == {"subject": "t", "group": "g1"}
        assert await bodies(client, 1) == [b"a"]
        assert await bodies(client, 0, "t") == []


# --- faults ---------------------------------------------------------------------------------------


async def test_a_transaction_survives_restarts_of_its_broker(broker: EmbeddedBroker):
    async with broker.connect(limits=EAGER) as client:
        async with client.transaction("shop") as tx:
            for body in (b"a", b"b", b"c"):
                await tx.send("s", body)
                await broker.restart()
        assert await bodies(client, 3) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("first", [True, False])
async def test_a_cancelled_send_gives_its_place_to_no_other_message(client: plait.Client, first: bool):
    wanted: list[bytes] = []
    async for at in every_step():
        subject, stored = f"s{at.step}", [] if first else [b"a"]
        transaction = client.transaction("shop")
        try:
            async with transaction as tx:
                for body in stored:
                    await tx.send(subject, body, key="k")
                if not (await at.cancel(tx.send(subject, b"b", key="k"))).cancelled:
                    stored.append(b"b")
                await tx.send(subject, b"c", key="k")
                stored.append(b"c")
        except plait.TransactionIncomplete:
            stored = []
        assert transaction.state == ("committed" if stored else "rolled back")
        assert await bodies(client, len(stored), subject) == stored
        wanted += stored
    assert b"c" in wanted
    assert await client.admin.transactions() == []


async def test_a_broker_that_forgot_a_transaction_without_messages_begins_it_again(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
):
    find, restarts = HalfSender._half_partition, 0

    async def restart(self: HalfSender, link: Link, name: str) -> int:
        nonlocal restarts
        if not restarts:
            restarts += 1
            await broker.restart()
            link = await self._node.ready()  # type: ignore[union-attr]
        return await find(self, link, name)

    monkeypatch.setattr(HalfSender, "_half_partition", restart)
    async with broker.connect(limits=EAGER) as client:
        async with client.transaction("shop") as tx:
            await tx.send("s", b"a")
        assert await bodies(client, 1) == [b"a"]


async def test_a_commit_that_gets_no_answer_is_in_doubt_and_not_rolled_back(broker: EmbeddedBroker):
    async with broker.connect(limits=msgspec.structs.replace(EAGER, send_seconds=0.5, request_seconds=1.0)) as client:
        tx = client.transaction("shop")

        async def work() -> None:
            async with tx:
                await tx.send("s", b"a")
                await broker.stop()

        with pytest.raises((plait.Timeout, plait.Unavailable)):
            await work()
        assert tx.state == "in doubt"
        with pytest.raises(plait.TransactionDecided, match="is in doubt"):
            await tx.rollback()


def test_the_blocking_client_has_transactions(plait_broker: BlockingBroker):
    asked: list[plait.TransactionInfo] = []

    def check(transaction: plait.TransactionInfo) -> str:
        asked.append(transaction)
        return "unknown"

    with plait.sync.connect(plait_broker.address) as client:
        with client.transaction("shop", check=check) as tx:  # type: ignore[arg-type]
            assert tx.send("s", b"a").sequence is None
            assert (tx.state, tx.producer_group) == ("open", "shop")
            assert client.admin.transaction(tx.id).count == 1
        with contextlib.suppress(RuntimeError), client.transaction("shop") as other:
            other.send("s", b"b")
            raise RuntimeError
        client.transaction_checks("shop", check)  # type: ignore[arg-type]
        assert (tx.state, other.state) == ("committed", "rolled back")
        with client.reader("s", start="earliest") as reader:
            assert [each.body for each in reader.fetch(10, wait=20)] == [b"a"]
            assert not reader.fetch(10, wait=0.1)
