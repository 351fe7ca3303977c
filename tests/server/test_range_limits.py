"""The number of ranges in a request is limited: the server handles them in one turn, and other clients wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plait.errors import LimitExceeded
from plait.limits import FAILED_RANGES_MAX, REQUEST_RANGES_MAX
from plait.wire import messages as m
from tests.server.conftest import Serve
from tests.server.raw import Raw

Request = Callable[[int, list[tuple[int, int, int]]], m.PacketHead]


def scattered(count: int) -> list[tuple[int, int, int]]:
    """Ranges of one row each: every other row."""
    return [(2 * n, 2 * n + 1, 1) for n in range(count)]


@pytest.mark.parametrize(
    ("request_of", "most", "limit"),
    [
        (lambda session, ranges: m.AckRequest(session, ranges), REQUEST_RANGES_MAX, "REQUEST_RANGES_MAX"),
        (
            lambda session, ranges: m.NackRequest(session, ranges, counted=False),
            REQUEST_RANGES_MAX,
            "REQUEST_RANGES_MAX",
        ),
        (
            lambda session, ranges: m.NackRequest(
                session, ranges[:10], counted=False, lp_ranges=ranges[10:], lp_tags=[1] * len(ranges[10:])
            ),
            REQUEST_RANGES_MAX,
            "REQUEST_RANGES_MAX",
        ),
        (lambda session, ranges: m.NackRequest(session, ranges), FAILED_RANGES_MAX, "FAILED_RANGES_MAX"),
        (lambda session, ranges: m.NackRequest(session, ranges, reject=True), FAILED_RANGES_MAX, "FAILED_RANGES_MAX"),
        (lambda _, ranges: m.AttachRequest("s", "h", "raw", holds=ranges), REQUEST_RANGES_MAX, "REQUEST_RANGES_MAX"),
    ],
    ids=["ack", "return", "return by logical partitions", "nack", "reject", "attach"],
)
async def test_a_request_with_more_ranges_than_the_limit_is_refused(
    serve: Serve, request_of: Request, most: int, limit: str
):
    server = await serve()
    async with Raw(server, "raw") as raw:
        await raw.store("s", b"a", b"b", b"c")
        session = await raw.attach("s")
        await raw.ask(m.PullRequest(session, 10, 1000, 0.0))
        with pytest.raises(LimitExceeded, match=f"{most + 1} ranges .* {most} \\({limit}\\); send several") as refused:
            await raw.ask(request_of(session, scattered(most + 1)))
        assert refused.value.details == {"limit": limit, "value": most}
        # The request has no effect, and the connection stays open.
        assert server.membership.group("s", "g").cursor.held_count == 3
        await raw.ask(request_of(session, scattered(2)))
