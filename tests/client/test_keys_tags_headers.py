"""Order keys, tags and headers: their rules, and their round trip through the broker."""

from __future__ import annotations

import math
from typing import Any

import pytest

import plait
from plait.client.send.open_rows import hash_keys
from plait.limits import HEADERS_SIZE_MAX, KEY_SIZE_MAX, LOGICAL_PARTITIONS, TAG_LENGTH_MAX, TAGS_MAX


async def read_all(client: plait.Client, subject: str = "s") -> list[plait.Message]:
    async with client.reader(subject, start="earliest") as reader:
        return await reader.fetch(10_000, wait=0)


@pytest.mark.parametrize(
    ("key", "text"),
    [("order-1", "order-1"), (42, "42"), (-7, "-7"), (10**30, "1" + "0" * 30), ("ключ", "ключ"), ("\0", "\0")],
)
async def test_a_key_is_text_or_an_int_as_decimal_text(client: plait.Client, key: str | int, text: str) -> None:
    await client.send("s", b"", key=key)
    client.post("s", b"", key=key)
    await client.send_many("s", [b""], keys=[key])
    assert [message.key for message in await read_all(client)] == [text] * 3


@pytest.mark.parametrize("key", [True, 1.5, "", b"k", ("k",), "\ud800"])
async def test_a_key_of_another_type_is_refused(client: plait.Client, key: Any) -> None:
    with pytest.raises(plait.InvalidArgument, match="key"):
        await client.send("s", b"", key=key)
    with pytest.raises(plait.InvalidArgument, match="key"):
        client.post("s", b"", key=key)
    with pytest.raises(plait.InvalidArgument, match="key"):
        await client.send_many("s", [b""], keys=[key])
    assert (await client.send("s", b"")).sequence == 0


async def test_a_key_at_the_limit_is_accepted_and_one_above_it_is_refused(client: plait.Client) -> None:
    await client.send("s", b"", key="ü" * (KEY_SIZE_MAX // 2))
    with pytest.raises(plait.TooLarge, match=str(KEY_SIZE_MAX)):
        await client.send("s", b"", key="ü" * (KEY_SIZE_MAX // 2) + "x")
    with pytest.raises(plait.TooLarge, match=str(KEY_SIZE_MAX)):
        await client.send("s", b"", key="x" * (KEY_SIZE_MAX + 1))


async def test_rows_with_and_without_keys_share_a_frame(client: plait.Client) -> None:
    for key in (None, "a", None, 5):
        client.post("s", b"", key=key)
    await client.flush()
    await client.send_many("s", [b"", b""], keys=[None, "b"])
    assert [message.key for message in await read_all(client)] == [None, "a", None, "5", None, "b"]


def test_the_hash_of_a_key_never_changes() -> None:
    """The hash is xxh3_64 of the UTF-8 text; a change would move keys to other partitions."""
    hashes = hash_keys(["order-1", "ключ", "42"], 3)
    assert hashes.tolist() == [6900751593513035894, 11102353883453021918, 1303733993043075473]
    assert (hashes % LOGICAL_PARTITIONS).tolist() == [118, 734, 401]


async def test_tags_and_headers_are_delivered_unchanged(client: plait.Client) -> None:
    headers: dict[str, str | int | float | bool] = {
        "city": "BJS",
        "amount": 5,
        "share": 0.5,
        "rush": True,
        "big": 2**63,
        "low": -(2**63),
        "none": "",
    }
    await client.send("s", b"1", tags=["new", "für dich"], headers=headers)
    client.post("s", b"2")
    client.post("s", b"3", tags="single", headers={})
    await client.flush()
    first, second, third = await read_all(client)
    assert first.tags == ["new", "für dich"]
    assert first.headers == headers
    assert {name: type(value) for name, value in first.headers.items()} == {n: type(v) for n, v in headers.items()}
    assert (second.tags, second.headers) == ([], {})
    assert (third.tags, third.headers) == (["single"], {})


async def test_special_floats_survive_in_headers(client: plait.Client) -> None:
    await client.send("s", b"", headers={"inf": math.inf, "nan": math.nan, "whole": 5.0})
    [message] = await read_all(client)
    assert message.headers["inf"] == math.inf
    assert math.isnan(float(message.headers["nan"]))
    assert isinstance(message.headers["whole"], float)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"x": None}, "NoneType"),
        ({"x": [1]}, "list"),
        ({"x": b"y"}, "bytes"),
        ({"": 1}, "non-empty"),
        ({5: 1}, "non-empty"),
        ({"x": 2**64}, "64 bits"),
        ({"x": "y" * HEADERS_SIZE_MAX}, str(HEADERS_SIZE_MAX)),
        ({"x": "\ud800"}, "cannot be encoded"),
    ],
)
async def test_invalid_headers_are_refused(client: plait.Client, headers: Any, reason: str) -> None:
    with pytest.raises(plait.InvalidArgument, match=reason):
        await client.send("s", b"", headers=headers)
    with pytest.raises(plait.InvalidArgument, match=reason):
        client.post("s", b"", headers=headers)
    assert (await client.send("s", b"")).sequence == 0


@pytest.mark.parametrize(
    ("tags", "reason"),
    [
        ([""], "tag ''"),
        (["a\nb"], "printable"),
        (["x" * (TAG_LENGTH_MAX + 1)], str(TAG_LENGTH_MAX)),
        ([5], "tag 5"),
        (["x"] * (TAGS_MAX + 1), f"limit of {TAGS_MAX}"),
    ],
)
async def test_invalid_tags_are_refused(client: plait.Client, tags: Any, reason: str) -> None:
    with pytest.raises(plait.InvalidArgument, match=reason):
        await client.send("s", b"", tags=tags)
    assert (await client.send("s", b"", tags=["x" * TAG_LENGTH_MAX] * TAGS_MAX)).sequence == 0


async def test_a_refused_row_leaves_its_frame_unchanged(client: plait.Client) -> None:
    client.post("s", b"1", key="a", tags=["t"])
    for refused in ({"key": ""}, {"tags": [""]}, {"headers": {"": 1}}, {"tags": ["ok"], "headers": {"x": None}}):
        with pytest.raises(plait.InvalidArgument):
            client.post("s", b"no", **refused)
    client.post("s", b"2", headers={"h": 1})
    await client.flush()
    rows = [(m.body, m.key, m.tags, m.headers) for m in await read_all(client)]
    assert rows == [(b"1", "a", ["t"], {}), (b"2", None, [], {"h": 1})]


async def test_send_many_takes_tags_and_headers_for_all_or_for_each(client: plait.Client) -> None:
    bodies = [b"%d" % n for n in range(3_000)]
    await client.send_many("all", bodies, tags=["new", "vip"], headers={"city": "BJS", "amount": 5})
    found = await read_all(client, "all")
    assert len(found) == 3_000
    assert {(tuple(m.tags), tuple(m.headers.items())) for m in found} == {
        (("new", "vip"), (("city", "BJS"), ("amount", 5)))
    }
    await client.send_many("text", [b"a"], tags="new", headers={})
    assert [(m.tags, m.headers) for m in await read_all(client, "text")] == [(["new"], {})]
    tags = [["odd"] if n % 2 else None for n in range(3_000)]
    headers = [{"n": n} if n % 3 else None for n in range(3_000)]
    keys = [f"k{n}" for n in range(3_000)]
    await client.send_many("each", bodies, keys=keys, tags=tags, headers=headers)
    for n, message in enumerate(await read_all(client, "each")):
        assert (message.key, message.tags, message.headers) == (
            f"k{n}",
            ["odd"] if n % 2 else [],
            {"n": n} if n % 3 else {},
        )


async def test_send_many_splits_large_headers_over_frames(client: plait.Client) -> None:
    await client.send_many("s", [b""] * 600, headers={"large": "x" * 60_000})
    assert (await client.admin.subject("s")).subject.count == 600


@pytest.mark.parametrize(
    "bad",
    [
        {"tags": [["a"]]},
        {"tags": 5},
        {"tags": [["a"], 5]},
        {"tags": ["a" * (TAG_LENGTH_MAX + 1)]},
        {"headers": [{}, {}, {}]},
        {"headers": "text"},
        {"headers": [{"a": 1}, 5]},
        {"headers": {"a": []}},
    ],
)
async def test_send_many_refuses_invalid_tags_and_headers(client: plait.Client, bad: dict[str, Any]) -> None:
    with pytest.raises(plait.InvalidArgument, match=r"tag|header"):
        await client.send_many("s", [b"a", b"b"], **bad)
    assert (await client.send("s", b"")).sequence == 0
