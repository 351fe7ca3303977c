"""Requests about dead letters: pages fit into a packet, and refusals name the mistake."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import GroupNotFound, InvalidArgument, PlaitError, SubjectNotFound
from plait.limits import MIB
from plait.model.reason import Reason
from plait.model.retry_policy import Retry
from plait.wire import messages as m
from tests.server.conftest import Serve
from tests.server.raw import Raw

OF = {"subject": "orders", "group": "g"}


async def ask(raw: Raw, operation: str, **arguments: Any) -> Any:
    return await raw.admin(f"dlq.{operation}", **{**OF, **arguments})


async def bury(raw: Raw, *bodies: bytes) -> None:
    """Make dead letters, each with a different reason."""
    for number, body in enumerate(bodies):
        await raw.store("orders", body, first=number + 1, previous=number)
    session = await raw.attach("orders", retry=Retry(attempts=1))
    for number in range(len(bodies)):
        await raw.ask(m.PullRequest(session, 1, 1, 0.0))
        await raw.ask(
            m.NackRequest(session, [(number, number + 1, 1)], None, Reason("ValueError", f"text {number}", "h"))
        )


async def test_letters_with_large_bodies_come_in_pages_that_fit(serve: Serve):
    server = await serve(message_segment_size=64 * MIB, retained_segment_size=64 * MIB)
    async with Raw(server, "raw") as raw:
        await bury(raw, *[b"%02d" % number + bytes(MIB) for number in range(20)])
        got: list[dict[str, Any]] = []
        after = -1
        while after is not None:
            page = await ask(raw, "list", after=after, bodies=True, limit=1000)
            assert sum(len(letter["body"]) for letter in page["rows"]) <= 8 * MIB
            got += page["rows"]
            after = page["next"]
        assert [letter["body"][:2] for letter in got] == [b"%02d" % number for number in range(20)]
        assert [letter["reason"][1] for letter in got] == [f"text {number}" for number in range(20)]
        assert len((await ask(raw, "list", limit=1000))["rows"]) == 20, "without bodies they fit into one page"


async def test_letters_are_counted_resent_and_purged(serve: Serve):
    server = await serve()
    async with Raw(server, "raw") as raw:
        await bury(raw, *[b"x"] * 5)
        [reason] = (await ask(raw, "reasons"))["rows"]
        assert (reason["type"], reason["handler"], reason["count"]) == ("ValueError", "h", 5)
        assert await ask(raw, "resend", dry_run=True, limit=2) == {"count": 2, "next": 1}
        assert await ask(raw, "resend", select={"sequences": [0, 3, 99]}) == {"count": 2, "next": None}
        assert await ask(raw, "resend", select={"sequences": [0, 3]}) == {"count": 0, "next": None}
        assert await ask(raw, "purge") == {"count": 3, "next": None}
        assert await raw.admin("dlq.queues") == []


@pytest.mark.parametrize(
    ("operation", "arguments", "error", "expected"),
    [
        ("list", {"limit": 0}, InvalidArgument, "use 1 to 1000"),
        ("list", {"limit": 1001}, InvalidArgument, "use 1 to 1000"),
        ("resend", {"limit": 2001}, InvalidArgument, "use 1 to 2000"),
        ("purge", {"select": {"sequences": [-1]}}, InvalidArgument, "must be 0 to"),
        ("purge", {"select": {"sequences": list(range(5001))}}, InvalidArgument, "name 5000 at a time"),
        ("purge", {"select": {"kind": "x"}}, InvalidArgument, "unknown field"),
        ("resend", {"group": "missing"}, GroupNotFound, "it has: g"),
        ("reasons", {"subject": "nothing"}, SubjectNotFound, "'nothing' does not exist"),
        ("list", {"after": "first"}, InvalidArgument, "dlq.list"),
    ],
)
async def test_an_invalid_request_is_refused_and_changes_nothing(
    serve: Serve, operation: str, arguments: dict[str, Any], error: type[PlaitError], expected: str
):
    server = await serve()
    async with Raw(server, "raw") as raw:
        await bury(raw, b"x")
        with pytest.raises(error, match=expected):
            await ask(raw, operation, **arguments)
        assert len((await ask(raw, "list"))["rows"]) == 1
