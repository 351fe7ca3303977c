"""Arguments of management calls: the forms that they accept, and the values that they refuse by name."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import plait
from plait.client.admin.dead_letter_admin import selection_of
from tests.client.support import send

NOW = datetime.now(UTC)


@pytest.mark.parametrize(
    "sequences",
    [
        [1, 2],
        (1, 2),
        {1, 2},
        range(1, 3),
        iter([1, 2]),
        [np.int64(1), np.uint8(2)],
        np.array([1, 2]),
        pa.array([1, 2]),
        pa.chunked_array([pa.array([1]), pa.array([2])]),
    ],
)
def test_sequences_are_accepted_as_any_collection_of_integers(sequences: Any):
    assert selection_of({"sequences": sequences}).sequences == [1, 2]


@pytest.mark.parametrize(
    "sequences",
    [
        *(0, 5.0, "12", b"12", True, [True], ["1"], [1.0], [None], [-1], [2**70], [1 << 62], [10**5000]),
        *(np.array(1), np.array([1.5]), np.array([True]), pa.array([1, None]), [np.timedelta64(1, "s")]),
    ],
    ids=lambda value: repr(type(value)),
)
def test_invalid_sequences_are_refused(sequences: Any):
    with pytest.raises(plait.InvalidArgument, match=r"use a list of numbers|use a whole number|is out of range"):
        selection_of({"sequences": sequences})


def test_an_exception_type_is_given_by_class_or_by_name():
    assert selection_of({"type": ValueError}).type == "ValueError"
    assert selection_of({"type": plait.CodecError}).type == "plait.CodecError"
    assert selection_of({"type": "ValueError"}).type == "ValueError"
    for wrong in (ValueError("x"), int, 5, b"ValueError"):
        with pytest.raises(plait.InvalidArgument, match="use its name"):
            selection_of({"type": wrong})  # type: ignore[typeddict-item]
    with pytest.raises(plait.InvalidArgument, match=r"handler <function .* is a function; use its name"):
        selection_of({"handler": test_an_exception_type_is_given_by_class_or_by_name})  # type: ignore[typeddict-item]


@pytest.mark.parametrize("wrong", ["3", None, 2.0, True, [1]])
async def test_limits_and_rates_of_another_type_are_refused(client: plait.Client, wrong: Any) -> None:
    await send(client, 1)
    with pytest.raises(plait.InvalidArgument, match=r"limit .* use a whole number"):
        await client.admin.dead_letters("s", "g", limit=wrong)
    with pytest.raises(plait.InvalidArgument, match=r"limit .* use a whole number"):
        await client.admin.scheduled("s", limit=wrong)
    if wrong not in (None, 2.0):
        with pytest.raises(plait.InvalidArgument, match=r"rate .* use a number of messages per second"):
            await client.admin.resend_dead("s", "g", rate=wrong, dry_run=True)


async def test_huge_values_are_refused_and_the_client_stays_usable(client: plait.Client) -> None:
    await send(client, 1)
    admin = client.admin
    calls: list[Any] = [
        lambda: admin.cancel_scheduled("s", 2**70, NOW),
        lambda: admin.cancel_scheduled("s", -1, NOW),
        lambda: admin.reschedule("s", 2**70, NOW, to=NOW),
        lambda: admin.scheduled("s", end=timedelta.max),
        lambda: admin.scheduled("s", start="-999999d"),
        lambda: admin.schedule_counts("s", end=10**400),
        lambda: admin.dead_letter("s", "g", 2**70),
        lambda: admin.purge_dead("s", "g", sequences=[2**70]),
        lambda: admin.rewind_group("s", "g", 2**70),
        lambda: admin.create_subject("t", retention_bytes=2**70),
        lambda: admin.create_subject("t", retention_bytes=object()),  # type: ignore[arg-type]
        lambda: admin.resend_dead("s", "g", rate=10**400),
        lambda: client.send("s", b"x", delay=10**400),
    ]
    for call in calls:
        with pytest.raises(plait.InvalidArgument) as refused:
            await call()
        assert len(str(refused.value)) < 300
    link = client._node.link
    assert link is not None
    assert len(link._calls) <= 1, "only a heartbeat may wait for its answer"
    assert (await client.admin.subject("s")).subject.count == 1
