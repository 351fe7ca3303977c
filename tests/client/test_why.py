"""``why``: each state of a message for a group, in words and with its history."""

from __future__ import annotations

import asyncio

import pytest

import plait
import plait.sync
from plait.broker.query import history
from plait.errors import InvalidArgument
from plait.testing import EmbeddedBroker


def actions(found: plait.Explanation) -> list[str]:
    return [event.text for event in found.history]


async def test_a_message_from_its_send_to_its_ack(client: plait.Client) -> None:
    first, second = await client.send("s", b"1"), await client.send("s", b"2")
    found = await client.why(first, group="g", subject="s")
    assert (found.state, found.sequence) == ("no_group", 0)
    async with client.consumer("s", "g", prefetch=1) as consumer:
        (message,) = await consumer.fetch(1)
        found = await client.why(message, group="g")
        assert (found.state, found.client, found.attempt) == ("held", client.client_id, 1)
        assert f"delivered to consumer {client.client_id} since" in found.text
        assert actions(found) == [f"delivered to {client.client_id} (attempt 1)"]
        await message.ack()
        await consumer.flush()
        found = await client.why(str(first.message_id), group="g")
        assert found.state == "done"
        assert f"it was acked by consumer {client.client_id} at" in found.text
        assert actions(found) == [f"acked by {client.client_id}", f"delivered to {client.client_id} (attempt 1)"]
    later = await client.send("s", b"3")
    found = await client.why(later, group="g")
    assert found.state in ("next", "returned")
    assert (await client.why(second, group="g")).partition == second.partition


async def test_a_message_that_others_overtook(client: plait.Client) -> None:
    low = await client.send_many("s", [b"0"] * 200)
    high = await client.send_many("s", [b"9"] * 200, priority=9)
    async with client.consumer("s", "g", prefetch=1) as consumer:
        (first,) = await consumer.fetch(1)
        assert first.priority == 9
        await first.ack()
    found = await client.why(low[100], group="g")
    assert (found.state, actions(found)) == ("next", [])
    assert "No consumer of group g has begun it; 100 sequences are before it, and later ones overtook it." in found.text
    found = await client.why(high[199], group="g")
    assert "398 sequences are before it. No consumer" in found.text


async def test_retries_dead_letters_and_resends(client: plait.Client) -> None:
    receipt = await client.send("s", b"1")
    async with client.consumer("s", "g", retry=plait.Retry(attempts=2)) as consumer:
        (message,) = await consumer.fetch(1)
        await message.nack(delay=3600, reason="no stock")
        await consumer.flush()
        found = await client.why(receipt, group="g")
        assert found.state == "retry"
        assert found.due is not None
        assert "again at" in actions(found)[0]
    async with client.consumer("t", "g") as consumer:
        other = await client.send("t", b"1")
        (message,) = await consumer.fetch(1)
        await message.reject(reason="bad order")
        await consumer.flush()
        found = await client.why(other, group="g")
        assert found.state == "dead"
        assert "bad order" in found.text
        assert actions(found)[0].startswith("became a dead letter")
        await client.admin.purge_dead("t", "g")
        assert "deleted at" in (await client.why(other, group="g")).text


async def test_messages_that_wait_behind_their_key(client: plait.Client) -> None:
    await client.admin.create_subject("s", order="strict")
    receipts = [await client.send("s", b"%d" % n, key="k") for n in range(3)]
    other = await client.send("s", b"other", key="other")
    async with client.consumer("s", "g", ordered=True, retry=plait.Retry(attempts=2)) as consumer:
        async with asyncio.timeout(20):
            handled: set[bytes] = set()
            while not {b"0", b"other"} <= handled:
                for message in await consumer.fetch(1, wait=0.1):
                    handled.add(message.body)
                    if message.body == b"0":
                        await message.nack(delay=3600)
                    else:
                        await message.ack()
            await consumer.flush()
            found = await client.why(receipts[0], group="g")
            assert found.state == "retry"
            assert any("failed" in text for text in actions(found))
            found = await client.why(receipts[1], group="g")
            assert found.state == "behind"
            assert f"sequence {receipts[0].sequence}" in found.text
            found = await client.why(other, group="g")
            assert found.state == "done"
            assert found.history[0].text == f"acked by {client.client_id}"


async def test_delayed_unknown_and_removed_messages(client: plait.Client) -> None:
    delayed = await client.send("s", b"later", delay=3600)
    found = await client.why(delayed, group="g", subject="s")
    assert (found.state, found.due) == ("delayed", delayed.deliver_at)
    found = await client.why("00000000000000ff-7", group="g", subject="s")
    assert found.state == "unknown"
    assert "never stored there" in found.text
    assert (await client.why("00000000000000ff-7", group="other")).state == "unknown"
    with pytest.raises(InvalidArgument, match="message id"):
        await client.why("seven", group="g")


async def test_at_most_once_and_rewinds(client: plait.Client) -> None:
    receipt = await client.send("s", b"1")
    async with client.consumer("s", "once", delivery="at_most_once") as consumer:
        await consumer.fetch(1)
    found = await client.why(receipt, group="once")
    assert "at-most-once groups record no ack" in found.text
    async with client.consumer("s", "g", start="latest"):
        pass
    assert (await client.why(receipt, group="g")).state == "before"
    await client.admin.rewind_group("s", "g", "earliest")
    assert (await client.why(receipt, group="g")).state == "next"
    await client.admin.rewind_group("s", "g", "latest")
    found = await client.why(receipt, group="g")
    assert "passed it by a rewind" in found.text


async def test_messages_that_the_filter_leaves_out(client: plait.Client) -> None:
    out = await client.send("s", b"1", headers={"city": "SHA", "other": 1}, tags=["new"])
    await client.send("s", b"2", headers={"city": "BJS"})
    async with client.consumer("s", "g", where="city = 'BJS'") as consumer:
        (message,) = await consumer.fetch(1)
        assert message.body == b"2"
        await message.ack()
    found = await client.why(out, group="g")
    assert found.state == "done"
    assert "The filter of group g left it out at" in found.text
    assert "The filter is now: city = 'BJS'. The message has city = 'SHA'." in found.text
    assert actions(found) == ["left out by the filter of the group"]


async def test_the_text_has_the_values_that_the_filter_looks_at(client: plait.Client) -> None:
    """A header whose name is a part of the condition's text is none of them; one that is missing is."""
    out = await client.send("s", b"1", headers={"i": 1, "amount": 3}, key="k", tags=["old"])
    await client.send("s", b"2", headers={"amount": 9, "city": "x"})
    for group, filters, values in (
        ("g", {"where": "amount > 5 AND city IS NOT NULL"}, "amount = 3, no header city."),
        ("h", {"where": "key <> 'k' OR 'x' IN tags OR amount > 5"}, "amount = 3, tags = ['old'], key = 'k'."),
        ("t", {"tags": plait.TagFilter(none="old")}, "tags = ['old']."),
    ):
        async with client.consumer("s", group, **filters) as consumer:  # type: ignore[arg-type]
            await (await consumer.fetch(1))[0].ack()
        assert f"The message has {values}" in (await client.why(out, group=group)).text


async def test_a_paused_group_is_named_as_the_reason(client: plait.Client) -> None:
    await client.send("s", b"1")
    async with client.consumer("s", "g") as consumer:
        await (await consumer.fetch(1))[0].ack()
    await client.admin.pause_group("s", "g")
    receipt = await client.send("s", b"2")
    found = await client.why(receipt, group="g")
    assert found.state == "next"
    assert "The group is paused since" in found.text
    await client.admin.resume_group("s", "g")
    assert "paused" not in (await client.why(receipt, group="g")).text


async def test_a_message_of_an_undecided_transaction(client: plait.Client) -> None:
    await client.send("s", b"1")
    async with client.consumer("s", "g"):
        pass
    async with client.transaction(producer_group="shop") as transaction:
        receipt = await transaction.send("s", b"half")
        found = await client.why(receipt, group="g")
        assert (found.state, found.subject) == ("undecided", "s")
        assert f"transaction {transaction.id} of producer group shop, which is open and not decided" in found.text
    found = await client.why(receipt, group="g")
    assert found.state in ("next", "undecided")


async def test_a_group_that_consumes_nothing(client: plait.Client) -> None:
    receipt = await client.send("s", b"1")
    found = await client.why(receipt, group="g")
    assert (found.state, found.text.split(".")[0]) == ("unknown", "Group g consumes no subject")


async def test_a_long_history_is_partial(client: plait.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    receipt = await client.send("s", b"1")
    async with client.consumer("s", "g") as consumer:
        for _ in range(4):
            (message,) = await consumer.fetch(1, wait=5)
            await message.nack(delay=0)
            await consumer.flush()
        whole = await client.why(receipt, group="g")
        assert not whole.partial
        assert len(whole.history) >= 8
        monkeypatch.setattr(history, "EVENTS_MAX", 3)
        cut = await client.why(receipt, group="g")
        assert cut.partial
        assert cut.history == whole.history[: len(cut.history)]


async def test_a_restart_keeps_the_history(plait_async_broker: EmbeddedBroker) -> None:
    async with plait_async_broker.connect() as client:
        receipt = await client.send("s", b"1")
        async with client.consumer("s", "g") as consumer:
            (message,) = await consumer.fetch(1)
            await message.ack()
        before = await client.why(receipt, group="g")
        await plait_async_broker.restart()
        after = await client.why(receipt, group="g")
        assert after == before
        assert len(after.history) == 2


def test_blocking_clients_ask_too(plait_broker: EmbeddedBroker) -> None:
    with plait.sync.connect(plait_broker.address) as client:
        receipt = client.send("s", b"a")
        assert client.why(receipt, group="g", subject="s").state == "no_group"
