"""Requests about parked keys: list, resume and skip them; refusals name the mistake."""

from __future__ import annotations

from typing import Any

import pytest

from plait.client.send.open_rows import hash_keys
from plait.errors import GroupNotFound, InvalidArgument, KeyNotParked, PlaitError, SubjectNotFound
from plait.frame.builder import build_frame
from plait.frame.columns import Column
from plait.frame.view import frames_in
from plait.limits import LOGICAL_PARTITIONS
from plait.model.reason import Reason
from plait.model.retry_policy import Retry
from plait.server import Server
from plait.testing.simulated_disk import SimulatedDisk
from plait.wire import messages as m
from tests.server.conftest import Serve
from tests.server.raw import Raw

OF = {"subject": "orders", "group": "g"}
PULL = (100, 1 << 20)


def hash_of(key: str) -> int:
    return int(hash_keys([key], 1)[0])


async def send(raw: Raw, *rows: tuple[str, bytes], first: int = 1) -> None:
    keys = [key for key, _ in rows]
    frame = build_frame(
        [body for _, body in rows],
        producer=7,
        first=first,
        previous=first - 1,
        keys=keys,
        key_hashes=hash_keys(keys, len(keys)),
    )
    await raw.ask(m.SendRequest(await raw.route("orders")), frame.tobytes())


class Member:
    """The only consumer of the group, which owns all locks."""

    def __init__(self, raw: Raw, session: int) -> None:
        self.raw = raw
        self.session = session

    async def lease(self) -> m.LeaseReply:
        leased: m.LeaseReply = await self.raw.ask(m.LeaseRequest(self.session, [(0, LOGICAL_PARTITIONS, 1, 0)]))
        return leased

    async def pull(self, wait: float = 0.0) -> list[bytes]:
        return self.take(await self.raw.answer(self.raw.request(m.PullRequest(self.session, *PULL, wait))))

    def take(self, answer: Any) -> list[bytes]:
        """The bodies of a reply. The member holds the rows until ``ack`` or ``reject``."""
        self.pulled: m.PullReply = answer.message
        return [body for frame in frames_in(answer.payload) for body in frame.binary(Column.BODY).to_pylist()]

    async def ack(self) -> None:
        ranges = [(start, end, 1) for start, end, _ in self.pulled.ranges]
        await self.raw.ask(m.AckRequest(self.session, ranges, self.pulled.tags))

    async def reject(self, sequence: int, text: str) -> None:
        """Reject a row of the last delivery."""
        tag = next(
            tag for (a, b, _), tag in zip(self.pulled.ranges, self.pulled.tags, strict=True) if a <= sequence < b
        )
        reason = Reason("ValueError", text, "h")
        await self.raw.ask(m.NackRequest(self.session, [(sequence, sequence + 1, 1)], None, reason, True, True, [tag]))


async def park(raw: Raw) -> Member:
    """Park keys a and b by rejecting their first messages. Each has one more message; key c is not parked."""
    await raw.hello()
    await raw.admin("subject.create", subject="orders", order="strict")
    await send(raw, ("a", b"a1"), ("b", b"b1"), ("c", b"c1"), ("a", b"a2"), ("b", b"b2"))
    member = Member(raw, await raw.attach("orders", ordered=True, retry=Retry(attempts=3)))
    await member.lease()
    assert await member.pull() == [b"a1", b"b1", b"c1", b"a2", b"b2"]
    await member.reject(0, "first")
    await member.reject(1, "second")
    await member.ack()
    assert await member.pull() == []
    return member


@pytest.fixture
async def server(serve: Serve) -> Server:
    return await serve()


async def parked(raw: Raw) -> dict[str, dict[str, Any]]:
    page = await raw.admin("group.parked", **OF)
    assert page["next"] is None
    return {each["key"]: each for each in page["rows"]}


async def test_parked_keys_are_listed_with_their_letters(server: Server):
    async with Raw(server) as raw:
        await park(raw)
        found = await parked(raw)
        since = {key: each.pop("since") for key, each in found.items()}
        assert found == {
            key: {
                "key": key,
                "hash": hash_of(key),
                "lp": hash_of(key) % LOGICAL_PARTITIONS,
                "sequence": sequence,
                "attempts": 1,
                "reason": ["ValueError", text, "h"],
            }
            for key, sequence, text in (("a", 0, "first"), ("b", 1, "second"))
        }
        assert all(abs(time - server.clock.now()) < 60_000_000 for time in since.values())
        view = await raw.admin("group.describe", **OF)
        assert (view["ordered"], view["holding"], view["parked"], view["dead"]) == (True, 2, 2, 2)


async def test_resume_delivers_the_failed_message_again_and_wakes_a_suspended_pull(server: Server):
    async with Raw(server) as raw, Raw(server) as operator:
        member = await park(raw)
        await operator.hello("operator")
        waiting = raw.request(m.PullRequest(member.session, *PULL, 30.0))
        assert await operator.admin("group.resume", **OF, keys=[hash_of("a")]) == 1
        # The pull reports news; the member renews its lease and pulls again.
        assert member.take(await raw.answer(waiting)) == []
        news = member.pulled.news
        assert (await member.lease()).parked == [hash_of("b")]
        assert news > 0
        assert await member.pull(30.0) == [b"a1"]
        await member.ack()
        assert await member.pull() == [b"a2"]
        assert list(await parked(operator)) == ["b"]


async def test_an_answered_resume_survives_a_crash(serve: Serve):
    disk = SimulatedDisk()
    server = await serve(disk)
    async with Raw(server) as raw:
        await park(raw)
        assert await raw.admin("group.resume", **OF, keys=[hash_of("a")]) == 1
    await server.abandon()
    again = await serve(disk)
    async with Raw(again, "raw") as raw:
        assert list(await parked(raw)) == ["b"]
        view = await raw.admin("group.describe", **OF)
        assert (view["parked"], view["dead"]) == (1, 1)


async def test_a_key_whose_letter_was_purged_is_listed_and_continues_after_it(server: Server):
    async with Raw(server) as raw:
        member = await park(raw)
        await raw.admin("dlq.purge", **OF, select={"sequences": [0]})
        page = await raw.admin("group.parked", **OF)
        assert {each["hash"]: each["key"] for each in page["rows"]} == {hash_of("a"): None, hash_of("b"): "b"}
        assert await raw.admin("group.resume", **OF, keys=[hash_of("a")]) == 1
        assert await member.pull() == [b"a2"]


async def test_a_letter_that_was_resent_waits_until_its_key_is_resumed(server: Server):
    async with Raw(server) as raw:
        member = await park(raw)
        await raw.admin("dlq.resend", **OF, select={"sequences": [0]})
        assert await member.pull() == []
        assert await raw.admin("group.skip", **OF, keys=[hash_of("a")]) == 1
        assert await member.pull() == [b"a1"]
        await member.ack()
        assert await member.pull() == [b"a2"]


@pytest.mark.parametrize(
    ("operation", "arguments", "error", "expected"),
    [
        ("resume", {"keys": [17]}, KeyNotParked, "none of these keys is parked in group 'g' on 'orders'"),
        ("skip", {"keys": [hash_of("c")]}, KeyNotParked, "none of these keys"),
        ("resume", {"keys": []}, InvalidArgument, "name 1 to 500 at a time"),
        ("skip", {"keys": list(range(501))}, InvalidArgument, "the request names 501 keys"),
        ("resume", {"keys": ["a"]}, InvalidArgument, "group.resume"),
        ("resume", {}, InvalidArgument, "keys"),
        ("resume", {"keys": [1], "group": "missing"}, GroupNotFound, "it has: g"),
        ("parked", {"subject": "nothing"}, SubjectNotFound, "'nothing' does not exist"),
        ("parked", {"limit": 0}, InvalidArgument, "use 1 to 500"),
        ("parked", {"limit": 501}, InvalidArgument, "use 1 to 500"),
        ("parked", {"group": "shared"}, InvalidArgument, "is not ordered"),
    ],
)
async def test_an_invalid_request_is_refused_with_the_reason(
    server: Server, operation: str, arguments: dict[str, Any], error: type[PlaitError], expected: str
):
    async with Raw(server) as raw:
        await park(raw)
        await raw.attach("orders", "shared")
        with pytest.raises(error, match=expected):
            await raw.admin(f"group.{operation}", **{**OF, **arguments})
        assert len(await parked(raw)) == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"partitions": 2}, "without a meta server it has one, on g1"),
        ({"partitions": 0}, "a subject cannot have 0 partitions"),
        ({"groups": ["g2"]}, "without a meta server there is only g1"),
        ({"order": "loose"}, "order"),
    ],
)
async def test_without_a_meta_server_subjects_have_one_partition(
    server: Server, arguments: dict[str, Any], expected: str
):
    async with Raw(server, "raw") as raw:
        with pytest.raises(InvalidArgument, match=expected):
            await raw.admin("subject.create", subject="s", **arguments)
        await raw.admin("subject.create", subject="s", partitions=1, groups=["g1"], order="strict")
        assert server.broker.subjects["s"].row.settings.order == "strict"


@pytest.mark.parametrize("operation", ["subject.route", "subject.expand", "broker.describe", "group.allocation"])
async def test_a_broker_refuses_operations_of_meta_servers(server: Server, operation: str):
    async with Raw(server, "raw") as raw:
        with pytest.raises(InvalidArgument, match=f"send {operation} to a meta server"):
            await raw.admin(operation, subject="s")
