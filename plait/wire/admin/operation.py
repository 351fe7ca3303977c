"""``Operation``: converts the arguments and the result of an admin request to and from its packets."""

from __future__ import annotations

from types import UnionType
from typing import Any, Generic, TypeVar

import msgspec

from plait.errors import InvalidArgument
from plait.wire import messages as m

R = TypeVar("R")
T = TypeVar("T")


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """Base of the arguments of admin requests."""


class Nothing(Request):
    """No arguments."""


class Page(msgspec.Struct, Generic[T], frozen=True):
    """A page of a listing, and the number after which the next page starts; None: the last page."""

    rows: list[T]
    next: int | None


class Operation(Generic[R]):
    """An admin request: its name, the struct of its arguments, and the type of its result."""

    def __init__(self, name: str, request: type[Request], reply: type[R] | UnionType | None = None) -> None:
        self.name = name
        self.request = request
        self._reply: Any = reply

    def packet(self, **arguments: Any) -> m.AdminRequest:
        """The request with these arguments."""
        return m.AdminRequest(self.name, msgspec.to_builtins(self.request(**arguments)))

    def arguments(self, packet: m.AdminRequest) -> Any:
        """The arguments of a request that a server received; raises ``InvalidArgument``."""
        try:
            return msgspec.convert(packet.arguments, self.request)
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"{self.name}: {error}") from None

    def result(self, reply: m.AdminReply) -> R:
        """The result that a client received."""
        result: R = msgspec.msgpack.decode(reply.result, type=self._reply)
        return result


def answer(result: Any) -> m.AdminReply:
    """The reply with a result."""
    return m.AdminReply(msgspec.Raw(msgspec.msgpack.encode(result)))
