"""Replays: every message of a history is sent again once, in order and marked, even if the process is killed."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import plait
from plait.broker import BrokerConfig
from plait.client.send import row_columns
from plait.clock import ManualClock
from plait.errors import InvalidArgument, PlaitError, TooLarge
from plait.limits import HEADERS_SIZE_MAX
from plait.server import Server
from plait.spark.history import replay as replay_module
from plait.spark.history.lookup import History
from plait.spark.history.replay import REPLAY, REPLAYED_FROM, KeyCount, Replay
from plait.spark.history.replay_state import StateFile
from plait.storage.disk import RealDisk
from tests.spark.histories import archive, serving, thirty_messages
from tests.support.broker_node import NO_WATERMARKS, SMALL_SEGMENTS


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template")
    thirty_messages(root)
    return root


@pytest.fixture
def history(template: Path, tmp_path: Path) -> History:
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return History(tmp_path / "archive", data=tmp_path / "data")


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[plait.Client]:
    """A client of another server than the history's."""
    disk = RealDisk(tmp_path / "target")
    server = Server(disk, BrokerConfig(**NO_WATERMARKS, **SMALL_SEGMENTS), port=0, meta=f"sqlite:///{tmp_path}/m.db")
    await server.start()
    try:
        async with plait.connect(server.address) as client:
            yield client
    finally:
        await server.stop()


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "BATCH_COUNT", 4)


def replay_of(history: History, to: str = "copy", **settings: Any) -> Replay:
    return Replay(history, history.selection("orders"), to, **settings)


async def stored(client: plait.Client, subject: str = "copy") -> list[plait.Message]:
    found: list[plait.Message] = []
    async with client.reader(subject, start="earliest") as reader:
        while rows := await reader.fetch(1000, 0.0):
            found += rows
    return found


def numbers(messages: list[plait.Message]) -> list[int]:
    return [int(message.body.removeprefix(b"body-")) for message in messages]


# --- what is sent -------------------------------------------------------------------------------


async def test_every_message_is_sent_again_unchanged_and_marked(history: History, target: plait.Client):
    done = await replay_of(history).run(target)
    messages = await stored(target)
    originals = history.find("orders").to_pylist()
    assert done[1:] == (30, 0)
    assert numbers(messages) == list(range(30))
    for message, original in zip(messages, originals, strict=True):
        assert message.key == original["key"]
        assert message.tags == (original["tags"] or [])
        number = message.sequence
        sent = {"number": number, "half": number / 2, "odd": number % 2 == 1, "city": "BJS"}
        marks = {REPLAYED_FROM: original["message_id"], REPLAY: done.run}
        assert message.headers == {**sent, **marks}
        assert [type(message.headers[name]) for name in sent] == [int, float, bool, str]


@pytest.mark.parametrize("years", [-50, 50])
async def test_the_clock_of_this_machine_does_not_limit_a_replay(
    history: History, target: plait.Client, tmp_path: Path, years: int
):
    """Brokers' clocks may be ahead of it: messages they stored are sent and counted all the same."""
    clock = ManualClock()
    clock.jump(years * 365 * 86_400)
    selection = history.selection("orders")
    count = history.table(selection).num_rows
    assert Replay(history, selection, "copy", clock=clock).count().messages == count
    assert (await Replay(history, selection, "copy", clock=clock).run(target)).sent == count


async def test_a_replay_into_the_same_subject_ends(tmp_path: Path):
    data, place = tmp_path / "data", tmp_path / "archive"
    async with serving(data) as client:
        for number in range(10):
            await client.send("orders", f"body-{number}", key="k")
    archive(data, place)
    async with serving(data) as client:
        history = History(place, data=data)
        await Replay(history, history.selection("orders"), "orders").run(client)
        assert numbers(await stored(client, "orders")) == [*range(10), *range(10)]


async def test_order_holds_per_key_over_several_partitions(history: History, target: plait.Client):
    await target.admin.create_subject("copy", partitions=4)
    await replay_of(history).run(target)
    messages = await stored(target)
    assert sorted(numbers(messages)) == list(range(30))
    assert len({message.partition for message in messages}) > 1
    for key in ("order-0", "order-1", "order-2"):
        mine = [message for message in messages if message.key == key]
        assert len({message.partition for message in mine}) == 1
        assert numbers(mine) == sorted(numbers(mine))


async def test_a_limit_sends_the_first_messages(history: History, target: plait.Client):
    assert (await replay_of(history, limit=7).run(target)).sent == 7
    assert numbers(await stored(target)) == list(range(7))


async def test_a_dry_run_counts_and_sends_nothing(history: History):
    counted = replay_of(history).count()
    assert (counted.messages, counted.keys) == (30, 3)
    assert counted.size == sum(len(f"body-{number}") for number in range(30))
    assert counted.first < counted.last


def test_more_keys_than_are_stored_are_counted_approximately():
    exact, near = KeyCount(exact_max=10_001), KeyCount(exact_max=1_000)
    for start in range(0, 10_000, 500):
        # Half of the keys were counted before.
        keys = pa.chunked_array([pa.array([None, *(f"key-{n}" for n in range(max(start - 500, 0), start + 500))])])
        exact.add(keys)
        near.add(keys)
    assert exact.count == 10_000
    assert near.count == pytest.approx(10_000, rel=0.1)
    assert KeyCount().count == 0


async def test_a_rate_is_observed(history: History, target: plait.Client):
    clock = ManualClock()
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        clock.advance(seconds)

    await Replay(history, history.selection("orders"), "copy", rate=20, clock=clock, sleep=sleep).run(target)
    assert waits == pytest.approx([0.1] * 15)


async def test_time_lost_by_reading_or_a_stall_is_not_recovered_by_a_burst(
    history: History, target: plait.Client, monkeypatch: pytest.MonkeyPatch
):
    clock = ManualClock()
    left: list[float] = []
    scan, send = History.scan, SENDER.send

    def slow_scan(*arguments: Any, **named: Any) -> Iterator[pa.Table]:
        clock.advance(60.0)
        yield from scan(*arguments, **named)

    async def send_with_a_stall(*arguments: Any) -> None:
        left.append(clock.monotonic())
        if len(left) == 5:
            clock.advance(30.0)
        await send(*arguments)

    async def sleep(seconds: float) -> None:
        clock.advance(seconds)

    monkeypatch.setattr(History, "scan", slow_scan)
    monkeypatch.setattr(SENDER, "send", send_with_a_stall)
    await replay_of(history, rate=20, clock=clock, sleep=sleep).run(target)
    pauses = [later - earlier for earlier, later in pairwise(left)]
    assert pauses == pytest.approx([0.1] * 4 + [30.0] + [0.1] * 9)


# --- killed and restarted -----------------------------------------------------------------------


SENDER = replay_module.ResumableSender


class Killed(BaseException):
    """Ends the process, like a signal without a handler."""


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, *, after: bool) -> None:
    """End the process before or after the given call of a method."""
    original = getattr(owner, name)
    calls = [0]
    is_async = name == "send"

    def due() -> bool:
        calls[0] += 1
        return calls[0] == call

    async def run_then_die(*arguments: Any) -> Any:
        now = due()
        if now and not after:
            raise Killed
        result = await original(*arguments)
        if now:
            raise Killed
        return result

    def save_then_die(*arguments: Any, **named: Any) -> Any:
        now = due()
        if now and not after:
            raise Killed
        result = original(*arguments, **named)
        if now:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, run_then_die if is_async else save_then_die)


async def run_and_die(
    monkeypatch: pytest.MonkeyPatch, history: History, target: plait.Client, state: Path, owner: Any, **when: Any
) -> None:
    """Run a replay whose process ends as ``kill_at`` defines."""
    with monkeypatch.context() as patch:
        kill_at(patch, owner, **when)
        async with plait.connect(target._node._addresses) as mortal:
            with pytest.raises(Killed):
                await replay_of(history, state=state).run(mortal)


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("what", ["send", "save"])
async def test_a_replay_resumed_after_a_kill_sends_the_rest_and_nothing_twice(
    history: History,
    target: plait.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    after: bool,
    partitions: int,
):
    await target.admin.create_subject("copy", partitions=partitions)
    owner = SENDER if what == "send" else StateFile
    state = tmp_path / "state.json"
    for call in (1, 3, 2):
        await run_and_die(monkeypatch, history, target, state, owner, name=what, call=call, after=after)
    async with plait.connect(target._node._addresses) as client:
        done = await replay_of(history, state=state).run(client)
    assert done.before + done.sent == 30
    messages = await stored(target)
    assert sorted(numbers(messages)) == list(range(30))
    assert {message.headers[REPLAY] for message in messages} == {done.run}
    for key in ("order-0", "order-1", "order-2"):
        mine = [number for message in messages if message.key == key for number in numbers([message])]
        assert mine == sorted(mine)


@pytest.mark.parametrize("call", [2, 5, 8])
async def test_a_batch_that_only_some_partitions_received_is_completed(
    history: History, target: plait.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
):
    """The process ends between the frames of a batch; the frames sent before are stored."""
    await target.admin.create_subject("copy", partitions=3)
    state = tmp_path / "state.json"
    await run_and_die(monkeypatch, history, target, state, row_columns, name="build_frame", call=call, after=False)
    # Meanwhile, messages of the log are archived.
    archive(tmp_path / "data", tmp_path / "archive")
    async with plait.connect(target._node._addresses) as client:
        await replay_of(history, state=state).run(client)
    assert sorted(numbers(await stored(target))) == list(range(30))


async def test_nothing_is_lost_if_the_partitions_of_the_target_changed(
    history: History,
    target: plait.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    state = tmp_path / "state.json"
    await run_and_die(monkeypatch, history, target, state, SENDER, name="send", call=3, after=True)
    await target.admin.expand_subject("copy", partitions=16)
    async with asyncio.timeout(30):
        while not (await target.admin.route("copy")).reached:
            pass
    async with plait.connect(target._node._addresses) as client:
        await replay_of(history, state=state).run(client)
    found = numbers(await stored(target))
    assert set(found) == set(range(30))
    assert len(found) <= 30 + 4
    assert "may be stored twice" in caplog.text


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("call", [1, 2, 3])
async def test_nothing_of_a_recreated_subject_is_lost_when_a_replay_resumes(
    target: plait.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, key: str | None
):
    """Sequences start at 0 again; the first life is archived, the second is not."""
    data, place, state = tmp_path / "twice", tmp_path / "twice-archive", tmp_path / "state.json"
    async with serving(data) as client:
        for number in range(9):
            await client.send("orders", f"body-{number}", key="k")
    archive(data, place)
    async with serving(data) as client:
        await client.admin.delete_subject("orders")
        for number in range(9, 18):
            await client.send("orders", f"body-{number}", key="k")
    history = History(place, data=data)
    monkeypatch.setattr(replay_module, "BATCH_COUNT", 3)

    def again() -> Replay:
        return Replay(history, history.selection("orders", key=key), "copy", state=state)

    with monkeypatch.context() as patch:
        kill_at(patch, SENDER, "send", call, after=True)
        async with plait.connect(target._node._addresses) as mortal:
            with pytest.raises(Killed):
                await again().run(mortal)
    async with plait.connect(target._node._addresses) as client:
        await again().run(client)
    assert sorted(numbers(await stored(target))) == list(range(18))


async def test_a_finished_replay_sends_nothing_again(history: History, target: plait.Client, tmp_path: Path):
    state = tmp_path / "state.json"
    first = await replay_of(history, state=state).run(target)
    second = await replay_of(history, state=state).run(target)
    assert second == (first.run, 0, 30)
    assert len(await stored(target)) == 30


async def test_messages_sent_after_the_start_are_not_replayed(
    history: History, target: plait.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    state = tmp_path / "state.json"
    await run_and_die(monkeypatch, history, target, state, SENDER, name="send", call=2, after=True)
    async with serving(tmp_path / "data") as client:
        await client.send("orders", b"body-99", key="order-1")
    async with plait.connect(target._node._addresses) as client:
        await replay_of(history, state=state).run(client)
    assert numbers(await stored(target)) == list(range(30))


# --- errors -------------------------------------------------------------------------------------


async def test_the_state_of_another_replay_is_refused(history: History, target: plait.Client, tmp_path: Path):
    state = tmp_path / "state.json"
    await replay_of(history, state=state).run(target)
    with pytest.raises(InvalidArgument, match="its to is 'copy', not 'elsewhere'"):
        await replay_of(history, "elsewhere", state=state).run(target)
    state.write_text("{}")
    with pytest.raises(InvalidArgument, match="not the state of a replay"):
        await replay_of(history, state=state).run(target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": None}, r"its data is \['.*/data'\], not \[\]"),
        ({"group": "g2"}, "its group is 'g1', not 'g2'"),
        ({"data": None, "server": "plait://127.0.0.1:9"}, "its data is"),
    ],
)
async def test_a_replay_must_resume_with_the_same_history(
    history: History, target: plait.Client, tmp_path: Path, change: dict[str, Any], message: str
):
    state = tmp_path / "state.json"
    await replay_of(history, state=state).run(target)
    other = History(tmp_path / "archive", **({"data": tmp_path / "data"} | change))
    with pytest.raises(InvalidArgument, match=message):
        await replay_of(other, state=state).run(target)


async def test_a_replay_must_resume_with_the_same_cluster(
    history: History, target: plait.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    state = tmp_path / "state.json"
    await run_and_die(monkeypatch, history, target, state, SENDER, name="send", call=2, after=True)
    addresses = target._node.addresses
    async with serving(tmp_path / "elsewhere") as client:
        with pytest.raises(InvalidArgument, match=f"it sends to {addresses[0]}, and not to"):
            await replay_of(history, state=state).run(client)
    # Another address beside a known one is accepted.
    async with plait.connect([*addresses, "plait://127.0.0.1:9"]) as client:
        await replay_of(history, state=state).run(client)
    assert numbers(await stored(target)) == list(range(30))
    async with serving(tmp_path / "elsewhere") as client:
        with pytest.raises(InvalidArgument, match="it sends to"):
            await replay_of(history, state=state).run(client)


async def test_two_processes_do_not_share_a_state(history: History, target: plait.Client, tmp_path: Path):
    holder = StateFile(tmp_path / "state.json")
    with pytest.raises(InvalidArgument, match="another process"):
        await replay_of(history, state=tmp_path / "state.json").run(target)
    holder.close()
    with pytest.raises(InvalidArgument, match="cannot be written"):
        await replay_of(history, state=tmp_path / "nowhere" / "state.json").run(target)


async def test_a_message_whose_headers_have_no_room_for_the_marks_is_named(tmp_path: Path, target: plait.Client):
    data, place = tmp_path / "full", tmp_path / "full-archive"
    async with serving(data) as client:
        await client.send("orders", b"body-0", headers={"h": "x" * (HEADERS_SIZE_MAX - 20)})
    archive(data, place)
    history = History(place)
    message_id = history.find("orders")["message_id"][0].as_py()
    with pytest.raises(TooLarge, match=f"message {message_id} cannot be sent again"):
        await replay_of(history).run(target)


@pytest.mark.parametrize("rate", [0, -1, float("inf")])
def test_an_invalid_rate_is_refused(history: History, rate: float):
    with pytest.raises(PlaitError, match="rate"):
        replay_of(history, rate=rate)
