"""Encodes bodies, order keys, tags and headers from what users pass to what frames store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from plait.errors import CodecError, InvalidArgument, TooLarge
from plait.frame.columns import TAG_SEPARATOR
from plait.limits import BODY_SIZE_MAX, HEADERS_SIZE_MAX, KEY_SIZE_MAX, TAGS_MAX
from plait.model import names

#: The header that replaces headers which cannot be decoded. Its value is their first ``UNREADABLE_SHOWN`` bytes, as
#: hexadecimal text.
UNREADABLE: Final = "plait-unreadable"
UNREADABLE_SHOWN: Final = 256

_json = msgspec.json.Encoder()
_headers = msgspec.msgpack.Encoder()
_decode_headers = msgspec.msgpack.Decoder(dict[str, str | bool | int | float])


def encode_body(body: Any) -> bytes:
    """bytes unchanged, str as UTF-8, anything else as JSON: dicts, msgspec structs, dataclasses, pydantic models."""
    if isinstance(body, bytes):
        encoded = body
    elif isinstance(body, str):
        try:
            encoded = body.encode()
        except UnicodeEncodeError as error:
            raise CodecError(f"a body of text cannot be encoded: {error}") from None
    elif isinstance(body, bytearray | memoryview):
        encoded = bytes(body)
    elif hasattr(body, "model_dump_json"):
        encoded = body.model_dump_json().encode()
    else:
        try:
            encoded = _json.encode(body)
        except (TypeError, ValueError) as error:
            raise CodecError(f"a body of type {type(body).__name__} cannot be encoded: {error}") from None
    if len(encoded) > BODY_SIZE_MAX:
        raise TooLarge(
            f"a body of {len(encoded)} bytes is over the limit of {BODY_SIZE_MAX}; store it elsewhere",
            limit="BODY_SIZE_MAX",
            value=BODY_SIZE_MAX,
            size=len(encoded),
        )
    return encoded


def encode_key(key: Any) -> str:
    """An order key as text: str unchanged, int in decimal."""
    if isinstance(key, str):
        text = key
    elif isinstance(key, int) and not isinstance(key, bool):
        text = str(key)
    else:
        raise InvalidArgument(f"key {key!r} is a {type(key).__name__}; use str or int")
    if not text:
        raise InvalidArgument("key '' is empty; leave it out for a message without a key")
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"key {text!r} cannot be encoded: {error}") from None
    if size > KEY_SIZE_MAX:
        raise TooLarge(
            f"a key of {size} bytes is over the limit of {KEY_SIZE_MAX}; use a shorter one",
            limit="KEY_SIZE_MAX",
            value=KEY_SIZE_MAX,
            size=size,
        )
    return text


def encode_tags(tags: Iterable[str] | str | None) -> bytes:
    """The tags joined by separators, with one at each end; empty if there are no tags."""
    if not tags:
        return b""
    tags = [tags] if isinstance(tags, str) else list(tags)
    if len(tags) > TAGS_MAX:
        raise TooLarge(
            f"{len(tags)} tags are over the limit of {TAGS_MAX}; use headers for the rest",
            limit="TAGS_MAX",
            value=TAGS_MAX,
            size=len(tags),
        )
    for tag in tags:
        names.check_tag(tag)
    return (TAG_SEPARATOR + TAG_SEPARATOR.join(tags) + TAG_SEPARATOR).encode()


def decode_tags(encoded: bytes) -> list[str]:
    """The reverse of ``encode_tags``."""
    return encoded.decode().strip(TAG_SEPARATOR).split(TAG_SEPARATOR) if encoded else []


def encode_headers(headers: Mapping[str, Any] | None) -> bytes:
    """Headers as a msgpack map; empty if there are no headers."""
    if not headers:
        return b""
    for name, value in headers.items():
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"header name {name!r} is not a non-empty str")
        if not isinstance(value, str | int | float):
            raise InvalidArgument(f"header {name!r} is a {type(value).__name__}; use str, int, float or bool")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            raise InvalidArgument(f"header {name!r} does not fit 64 bits; send it as text")
    try:
        encoded = _headers.encode(dict(headers))
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"headers cannot be encoded: {error}") from None
    if len(encoded) > HEADERS_SIZE_MAX:
        raise TooLarge(
            f"headers of {len(encoded)} bytes are over the limit of {HEADERS_SIZE_MAX}; put large values in the body",
            limit="HEADERS_SIZE_MAX",
            value=HEADERS_SIZE_MAX,
            size=len(encoded),
        )
    return encoded


def decode_headers(encoded: bytes) -> dict[str, str | int | float | bool]:
    """The reverse of ``encode_headers``.

    Brokers do not check headers, so another sender may have stored any bytes. Bytes that cannot be decoded are
    returned as one header, ``UNREADABLE``; the message is delivered like any other.
    """
    if not encoded:
        return {}
    headers = read_headers(encoded)
    return {UNREADABLE: encoded[:UNREADABLE_SHOWN].hex()} if headers is None else headers


def read_headers(encoded: bytes) -> dict[str, str | int | float | bool] | None:
    """The headers; None if ``encode_headers`` cannot have made the bytes."""
    try:
        headers = _decode_headers.decode(encoded)
    except ValueError:
        # From msgspec, or because text is not UTF-8.
        return None
    return None if "" in headers else headers
