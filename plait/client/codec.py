"""Decodes bodies into the types of handler parameters. ``send.encoding`` is the reverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from plait.errors import CodecError, InvalidArgument

Decode = Callable[[bytes], Any]


def decoder_for(kind: Any) -> Decode:
    """A decoder from a body to ``kind``: bytes unchanged, str from UTF-8, anything else from JSON.

    Supports the types of msgspec (structs, dataclasses, dict, list, numbers, unions...) and pydantic models. Raises
    ``InvalidArgument`` for any other type; the decoder raises ``CodecError``.
    """
    read: Decode
    # A pydantic model may run code of the user, whose other errors say nothing about the body.
    refusals: tuple[type[Exception], ...] = (ValueError,)
    if kind is bytes:
        return bytes
    if kind is str:
        read = bytes.decode
    elif _is_pydantic(kind):
        read = kind.model_validate_json
    else:
        try:
            msgspec.json.schema(kind, schema_hook=_schema_of_pydantic)
            read = msgspec.json.Decoder(kind, dec_hook=_convert_to_pydantic).decode
            refusals = (msgspec.MsgspecError, RecursionError, ValueError)
        except (TypeError, NameError, RuntimeError) as error:
            reason = str(error).splitlines()[-1]
            raise InvalidArgument(
                f"a body cannot be decoded as {_name(kind)} ({reason}); "
                "use bytes, str, dict, a msgspec struct, a dataclass or a pydantic model"
            ) from None

    def decode(body: bytes) -> Any:
        try:
            return read(body)
        except refusals as error:
            raise CodecError(f"the body cannot be decoded as {_name(kind)}: {error}") from None

    return decode


def _is_pydantic(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "model_validate_json")


def _convert_to_pydantic(kind: type, value: Any) -> Any:
    """A pydantic model inside another type, as in ``list[Model]``."""
    if _is_pydantic(kind):
        return kind.model_validate(value)  # type: ignore[attr-defined]
    # msgspec expects this error from a hook that does not support the type.
    raise NotImplementedError(f"{_name(kind)} cannot be decoded")


def _schema_of_pydantic(kind: type) -> dict[str, Any]:
    if _is_pydantic(kind):
        return {"type": "object"}
    # msgspec expects this error here too.
    raise NotImplementedError(f"{_name(kind)} cannot be decoded")


def _name(kind: Any) -> str:
    return kind.__qualname__ if isinstance(kind, type) and not hasattr(kind, "__origin__") else str(kind)
