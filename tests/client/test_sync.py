"""``plait.sync``: the blocking client, with the same names as the async one, usable from any thread."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from traceback import walk_stack
from typing import Any

import pytest

import plait
import plait.sync
from plait.client.blocking.loop_thread import LoopThread, shared_loop
from plait.testing import BlockingBroker, EmbeddedBroker, ManualClock


@pytest.fixture
def client(plait_broker: BlockingBroker) -> Iterator[plait.sync.Client]:
    with plait.sync.connect(plait_broker.address) as connected:
        yield connected


def send(client: plait.sync.Client, count: int, first: int = 0) -> None:
    client.send_many("s", [b"%d" % n for n in range(first, first + count)])


def numbers(messages: Any) -> list[int]:
    return [int(message.body) for message in messages]


def test_send_post_and_flush(client: plait.sync.Client) -> None:
    receipt = client.send("s", b"0", key=1, tags=["t"], headers={"h": 1})
    assert (receipt.sequence, str(receipt.partition)) == (0, "s@g1")
    ticket = client.post("s", b"1", key="k", tags=["u"], headers={"h": 2})
    assert ticket.result(timeout=60).sequence == 1
    assert ticket.done
    assert ticket.result().message_id.sequence == receipt.message_id.sequence + 1
    tickets = [client.post("s", b"%d" % n) for n in range(2, 100)]
    client.flush()
    assert all(ticket.done for ticket in tickets)
    assert client.send("s", b"", oneway=True).sequence is None
    receipts = client.send_many("s", [b"x"] * 3, keys=["a", "b", None])
    assert len(receipts) == 3
    with client.reader("s", start="earliest") as reader:
        first, second, *_ = reader.fetch(2)
    assert (first.key, first.tags, first.headers) == ("1", ["t"], {"h": 1})
    assert (second.key, second.tags, second.headers) == ("k", ["u"], {"h": 2})


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"subject": "a b", "body": b""}, plait.InvalidName),
        ({"subject": "s", "body": object()}, plait.CodecError),
        ({"subject": "s", "body": b"", "key": ""}, plait.InvalidArgument),
        ({"subject": "s", "body": b"", "tags": [""]}, plait.InvalidName),
        ({"subject": "s", "body": b"", "headers": {"x": None}}, plait.InvalidArgument),
        ({"subject": "s", "body": bytes(17_000_000)}, plait.TooLarge),
    ],
)
def test_an_invalid_post_raises_at_once(
    client: plait.sync.Client, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        client.post(**arguments)
    with pytest.raises(error):
        client.send(**arguments)
    client.flush()
    assert client.send("s", b"").sequence == 0


def test_the_caller_may_change_its_objects_after_a_post(client: plait.sync.Client) -> None:
    body, tags, headers = bytearray(b"before"), ["before"], {"h": "before"}
    ticket = client.post("s", body, tags=tags, headers=headers)
    body[:] = b"after!"
    tags[0] = headers["h"] = "after"
    ticket.result(10)
    with client.reader("s", start="earliest") as reader:
        [message] = reader.fetch(1)
    assert (message.body, message.tags, message.headers) == (b"before", ["before"], {"h": "before"})


def test_a_full_buffer_refuses_posts_until_it_is_flushed(plait_broker: BlockingBroker) -> None:
    limits = plait.ClientLimits(buffer_bytes=100_000)
    with plait.sync.connect(plait_broker.address, limits=limits) as client:
        client.send("s", b"")
        plait_broker.stop()
        refused = None
        for _ in range(200):
            try:
                client.post("s", bytes(1_000))
            except plait.BufferFull as error:
                refused = str(error)
                break
        assert refused is not None
        assert "client.flush()" in refused
        plait_broker.start()
        client.flush()
        client.post("s", b"room again").result(10)


def test_a_ticket_times_out_and_its_message_is_stored_later(plait_broker: BlockingBroker) -> None:
    with plait.sync.connect(plait_broker.address) as client:
        client.send("s", b"0")
        plait_broker.stop()
        ticket = client.post("s", b"1")
        with pytest.raises(plait.Timeout, match=r"within 0.01 s; the message may still be stored"):
            ticket.result(timeout=0.01)
        assert not ticket.done
        plait_broker.start()
        assert ticket.result().sequence == 1


def test_fetch_ack_and_nack(client: plait.sync.Client) -> None:
    send(client, 10)
    with client.consumer("s", group="g") as consumer:
        batch = consumer.fetch(10, wait=5)
        assert (len(batch), batch[0].body, numbers(batch[1:3]), batch[-1].body) == (10, b"0", [1, 2], b"9")
        batch[3].nack(delay=0)
        batch[4].ack()
        batch.ack()
        assert client.admin.group("s", "g").lag == 1
        [again] = consumer.fetch(10, wait=5)
        assert (again.body, again.attempt) == (b"3", 2)
        again.nack(delay=0)
        consumer.flush()
        arrow = consumer.fetch_arrow(10, wait=5)
        assert arrow.table["attempt"].to_pylist() == [3]
        arrow.nack([0], delay=0)
        batch = consumer.fetch(wait=5)
        batch.nack(delay=0)
        arrow = consumer.fetch_arrow(wait=5)
        assert len(arrow) == 1
        arrow.ack()
        assert list(consumer.fetch(1, wait=0)) == []
    assert client.admin.group("s", "g").lag == 0
    assert (repr(batch), repr(arrow)) == ("<Batch of 1 messages>", "<ArrowBatch of 1 messages>")


def test_iteration_blocks_for_the_next_message_and_a_break_loses_no_message(client: plait.sync.Client) -> None:
    send(client, 250)
    seen: list[int] = []
    with client.consumer("s", group="g") as consumer:
        for stop in (10, 120, 250):
            for message in consumer:
                seen.append(int(message.body))
                message.ack()
                if len(seen) == stop:
                    break
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(next, consumer)
            send(client, 1, first=250)
            seen += numbers([waiting.result(10)])
        send(client, 20, first=251)
        seen += numbers([next(consumer)])
        while len(seen) < 271:
            seen += numbers(consumer.fetch(7, wait=5))
    assert seen == list(range(271))


def test_closing_a_consumer_returns_unacked_messages(client: plait.sync.Client) -> None:
    send(client, 3)
    with client.consumer("s", group="g") as consumer:
        first, *_ = consumer.fetch(3)
        first.ack()
    with pytest.raises(plait.Closed, match="returned to the group"):
        first.ack()
    with client.consumer("s", group="g") as consumer:
        assert numbers(consumer.fetch(3)) == [1, 2]
    with pytest.raises(plait.Closed):
        consumer.fetch()
    assert list(consumer) == []


def test_an_iteration_ends_when_another_thread_closes_the_consumer(client: plait.sync.Client) -> None:
    with ThreadPoolExecutor(1) as pool, client.consumer("s", group="g") as consumer:
        waiting = pool.submit(list, consumer)
        while not consumer._inner._fetcher.waiting:
            pass
        consumer.close()
        assert waiting.result(10) == []


def test_each_row_is_either_handed_out_or_returned(client: plait.sync.Client) -> None:
    for turn in range(10):
        send(client, 50)
        group = f"g{turn}"
        with ThreadPoolExecutor(1) as pool:
            consumer = client.consumer("s", group=group, start=50 * turn).__enter__()
            seen: list[int] = []
            going = pool.submit(lambda consumer=consumer, seen=seen: seen.extend(m.sequence for m in consumer))
            while len(seen) < turn:
                pass
            consumer.close()
            going.result(10)
        with client.consumer("s", group=group) as consumer:
            attempts = {message.sequence: message.attempt for message in consumer.fetch(50)}
        begun = [sequence for sequence, attempt in attempts.items() if attempt == 2]
        assert sorted(begun) == sorted(seen)


def test_a_lost_consumer_does_not_hand_out_rows_of_other_consumers() -> None:
    with (
        EmbeddedBroker(clock=ManualClock()) as broker,
        plait.sync.connect(broker.address, client_id="slow") as slow,
        plait.sync.connect(broker.address, client_id="other") as other,
    ):
        send(slow, 10)
        with slow.consumer("s", group="g") as consumer:
            first = next(consumer)
            with other.consumer("s", group="g") as taking:
                # The pull is suspended at the broker before the other consumer loses its rows.
                assert len(taking.fetch(10, wait=0)) == 0
                other.admin.subjects()
                broker.advance(6, silent=["slow"])
                batch = taking.fetch(10, wait=20)
                assert sorted(numbers(batch)) == list(range(10))
                batch.ack()
            first.ack()
            consumer.flush()
            send(other, 1, first=10)
            assert numbers([next(consumer)]) == [10]


def test_messages_of_a_deleted_subject_are_not_handed_out(client: plait.sync.Client) -> None:
    send(client, 10)
    with client.consumer("s", group="g") as consumer:
        first = next(consumer)
        client.admin.delete_subject("s")
        send(client, 3, first=100)
        first.ack()
        consumer.flush()
        assert numbers([next(consumer), next(consumer)]) == [100, 101]


def test_readers(client: plait.sync.Client) -> None:
    send(client, 5)
    with client.reader("s", start=1) as reader:
        assert numbers(reader.fetch(2)) == [1, 2]
        assert numbers([next(reader)]) == [3]
        send(client, 2, first=5)
        assert numbers(reader.fetch(10)) == [4]
        assert [int(next(reader).body), int(next(reader).body)] == [5, 6]
        assert reader.fetch(wait=0) == []
        assert reader.position == ["sequence", 7]
    assert list(reader) == []
    with pytest.raises(plait.Closed):
        reader.fetch()


def test_a_client_that_is_not_open_refuses_calls(plait_broker: BlockingBroker) -> None:
    client = plait.sync.connect(plait_broker.address)
    uses: list[Callable[[], Any]] = [
        lambda: client.send("s", b""),
        lambda: client.post("s", b""),
        lambda: client.send_many("s", [b""]),
        lambda: client.flush(),
        lambda: client.consumer("s", group="g"),
        lambda: client.reader("s"),
        lambda: client.admin.subjects(),
    ]
    for state in ("not connected", "is closed"):
        for use in uses:
            with pytest.raises(plait.Closed, match=state):
                use()
        if state == "not connected":
            with client:
                ticket = client.post("s", b"")
    client.close()
    assert ticket.result().sequence == 0


def test_closing_sends_posted_rows(client: plait.sync.Client, plait_broker: BlockingBroker) -> None:
    with plait.sync.connect(plait_broker.address) as other:
        tickets = [other.post("s", b"%d" % n) for n in range(20_000)]
    assert [ticket.result().sequence for ticket in tickets] == list(range(20_000))


def test_one_loop_serves_all_clients(plait_broker: BlockingBroker, client: plait.sync.Client) -> None:
    with plait.sync.connect(plait_broker.address) as other:
        assert other._thread is client._thread is shared_loop()
        assert type(shared_loop().loop).__module__ == "uvloop"


# --- threads ----------------------------------------------------------------------------------------------------------


def test_threads_share_a_client(client: plait.sync.Client) -> None:
    def work(thread: int) -> list[int | None]:
        posted = [client.post("s", b"%d-%d" % (thread, n), key=thread) for n in range(500)]
        sent = [client.send("s", b"%d-%d" % (thread, n)).sequence for n in range(500, 520)]
        many = client.send_many("s", [b"%d-%d" % (thread, n) for n in range(520, 600)])
        return [ticket.result(20).sequence for ticket in posted] + sent + [receipt.sequence for receipt in many]

    with ThreadPoolExecutor(8) as pool:
        sequences = [sequence for result in pool.map(work, range(8)) for sequence in result]
    assert sorted(sequence for sequence in sequences if sequence is not None) == list(range(8 * 600))
    with client.consumer("s", group="g") as consumer:
        bodies: list[bytes] = []
        while len(bodies) < 8 * 600:
            bodies += [message.body for message in consumer.fetch(10_000)]
    for thread in range(8):
        own = [body for body in bodies if body.startswith(b"%d-" % thread)]
        assert own == [b"%d-%d" % (thread, n) for n in range(600)]


def test_threads_share_a_consumer(client: plait.sync.Client) -> None:
    send(client, 5_000)
    seen: queue.SimpleQueue[int] = queue.SimpleQueue()
    done = threading.Event()

    with client.consumer("s", group="g") as consumer:

        def iterate() -> None:
            for message in consumer:
                seen.put(int(message.body))
                message.ack()
                if seen.qsize() >= 5_000:
                    done.set()

        def fetch() -> None:
            while not done.is_set():
                try:
                    batch = consumer.fetch(17, wait=0.01)
                except plait.Closed:
                    # Closed after the check of ``done``.
                    return
                for message in batch:
                    seen.put(int(message.body))
                batch.ack()
                if seen.qsize() >= 5_000:
                    done.set()

        threads = [threading.Thread(target=target) for target in (iterate, fetch, iterate, fetch)]
        for thread in threads:
            thread.start()
        assert done.wait(30)
        consumer.flush()
        assert client.admin.group("s", "g").lag == 0
        consumer.close()
        for thread in threads:
            thread.join(20)
    assert sorted(seen.get() for _ in range(seen.qsize())) == list(range(5_000))


def test_a_blocking_call_on_the_loops_own_thread_is_refused() -> None:
    thread = LoopThread("test")

    async def inner() -> int:
        return 1

    async def outer() -> int:
        return thread.run(inner())

    try:
        assert thread.run(inner()) == 1
        with pytest.raises(RuntimeError, match="would never return"):
            thread.run(outer())
    finally:
        thread.stop()
    with pytest.raises(plait.Closed):
        thread.run(inner())


def test_a_call_that_times_out_is_cancelled_on_the_loop() -> None:
    thread = LoopThread("test")
    cancelled = threading.Event()

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    try:
        with pytest.raises(TimeoutError):
            thread.run(never(), timeout=0.01)
        assert cancelled.wait(10)
    finally:
        thread.stop()


# --- interrupts and ends ----------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """Raised by the signal handler below, as control-C raises KeyboardInterrupt."""


def test_an_interrupted_call_leaves_the_client_usable(client: plait.sync.Client) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    send(client, 1)
    previous = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with client.consumer("s", group="g") as consumer:
            next(consumer).ack()
            for wait in (lambda: next(consumer), lambda: consumer.fetch(1, wait=60)):
                interrupter = threading.Thread(target=_interrupt_when_waiting)
                interrupter.start()
                with pytest.raises(Interrupted):
                    wait()
                interrupter.join()
            send(client, 3, first=1)
            assert numbers([next(consumer)]) == [1]
            assert numbers(consumer.fetch(1)) == [2]
            assert numbers(consumer.fetch(1)) == [3]
    finally:
        signal.signal(signal.SIGUSR1, previous)


@pytest.mark.parametrize("ordered", [False, True], ids=["shared", "ordered"])
@pytest.mark.parametrize("what", ["consumer", "client"])
def test_an_interrupt_ends_the_wait_for_a_close_but_not_the_close(
    plait_broker: BlockingBroker, what: str, ordered: bool
) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    with plait.sync.connect(plait_broker.address) as client, plait.sync.connect(plait_broker.address) as other:
        send(client, 10)
        consumer = client.consumer("s", group="g", ordered=ordered).__enter__()
        assert len(consumer.fetch(5)) == 5
        link = client._inner._node.link
        assert link is not None
        # The client reads no replies, so the close waits.
        shared_loop().run(_call(link._transport.pause_reading))  # type: ignore[union-attr]
        previous = signal.signal(signal.SIGUSR1, interrupt)
        try:
            interrupter = threading.Thread(target=_interrupt_when_waiting)
            interrupter.start()
            with pytest.raises(Interrupted):
                (consumer if what == "consumer" else client).close()
            interrupter.join()
        finally:
            signal.signal(signal.SIGUSR1, previous)
        shared_loop().run(_call(link._transport.resume_reading))  # type: ignore[union-attr]
        with other.consumer("s", group="g", ordered=ordered) as successor:
            got: list[int] = []
            while len(got) < 10:
                got += numbers(successor.fetch(10, wait=20))
        assert sorted(got) == list(range(10))


async def _call(function: Callable[[], object]) -> None:
    function()


def _interrupt_when_waiting() -> None:
    """Send the signal once the main thread waits for the loop.

    The thread must already sleep: Python handles a signal that arrives just before the system call only when the call
    returns.
    """
    main = threading.main_thread()
    state = Path(f"/proc/self/task/{main.native_id}/stat")
    assert main.ident is not None
    while (
        not any(frame.f_code is LoopThread.run.__code__ for frame, _ in walk_stack(sys._current_frames()[main.ident]))
        or state.read_text().rpartition(")")[2].split()[0] != "S"
    ):
        os.sched_yield()
    os.kill(os.getpid(), signal.SIGUSR1)


UNTIDY = """
import sys, plait.sync
client = plait.sync.connect(sys.argv[1]).open()
consumer = client.consumer("s", group="g").__enter__()
client.post("s", b"posted").result(20)
print(consumer.fetch(1)[0].body.decode())
"""


def test_a_program_that_does_not_close_its_client_still_exits(plait_broker: BlockingBroker) -> None:
    command = [sys.executable, "-W", "error", "-c", UNTIDY, plait_broker.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "posted\n", "")


def test_a_closed_client_cannot_be_opened_again(plait_broker: BlockingBroker) -> None:
    client = plait.sync.connect(plait_broker.address)
    client.open()
    assert client.open() is client
    client.close()
    with pytest.raises(plait.Closed, match="the client is closed"):
        client.open()
    client.close()
