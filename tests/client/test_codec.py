"""Decoding bodies into the types of handler parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest

import plait
from plait.client.codec import decoder_for
from plait.client.send.encoding import encode_body


class Struct(msgspec.Struct):
    number: str
    amount: int = 0


@dataclass
class Data:
    number: str
    amount: int = 0


class Model(pydantic.BaseModel):
    number: str
    amount: int = 0


class Typed(TypedDict):
    number: str


#: Unusual, but valid.
STILL_FINE = [(dict, b'{"amount":"many"}'), (Any, b'{"amount":"many"}')]
JSON = b'{"number":"A-1","amount":5}'


@pytest.mark.parametrize(
    ("kind", "body", "value"),
    [
        (bytes, b"\xff\0", b"\xff\0"),
        (str, "grün".encode(), "grün"),
        (dict, JSON, {"number": "A-1", "amount": 5}),
        (dict[str, Any], JSON, {"number": "A-1", "amount": 5}),
        (Any, b"[1, null]", [1, None]),
        (int, b"5", 5),
        (list[int], b"[1,2]", [1, 2]),
        (Struct, JSON, Struct("A-1", 5)),
        (Struct | None, b"null", None),
        (Data, JSON, Data("A-1", 5)),
        (Model, JSON, Model(number="A-1", amount=5)),
        (list[Model], b"[" + JSON + b"]", [Model(number="A-1", amount=5)]),
        (Typed, b'{"number":"A-1"}', {"number": "A-1"}),
    ],
)
def test_a_body_is_decoded_into_the_requested_type(kind: Any, body: bytes, value: Any) -> None:
    assert decoder_for(kind)(body) == value


@pytest.mark.parametrize("value", [Struct("A-1", 5), Data("A-1", 5), Model(number="A-1", amount=5)])
def test_an_encoded_value_decodes_to_an_equal_value(value: Any) -> None:
    assert decoder_for(type(value))(encode_body(value)) == value


@pytest.mark.parametrize("kind", [str, dict, int, list[int], Struct, Data, Model, list[Model], Typed, Any])
@pytest.mark.parametrize("body", [b"\xff", b'{"amount":"many"}', b"[[[[", b"", b"[" * 100_000])
def test_an_undecodable_body_raises_only_a_codec_error(kind: Any, body: bytes) -> None:
    decode = decoder_for(kind)
    if (kind, body) in STILL_FINE or (kind is str and body != b"\xff"):
        decode(body)
        return
    with pytest.raises(plait.CodecError, match=r"^the body cannot be decoded as "):
        decode(body)


@pytest.mark.parametrize("kind", [object, complex, list[object], "Order", 5, type(None) | object])
def test_an_undecodable_type_is_refused(kind: Any) -> None:
    with pytest.raises(plait.InvalidArgument, match="use bytes, str, dict"):
        decoder_for(kind)
