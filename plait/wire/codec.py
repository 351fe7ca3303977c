"""Encodes messages as the heads of packets, and decodes them, with a size limit for each kind of packet.

Errors are sent as a message, ``ErrorReply``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from plait.errors import InvalidArgument, PlaitError, ProtocolError, from_code
from plait.limits import KIB, MIB, PACKET_SIZE_MAX
from plait.wire import messages as m
from plait.wire import query_messages as q

_ANSWERS: list[tuple[type[m.PacketHead], type[m.PacketHead]]] = [
    (m.Hello, m.Welcome),
    (m.HeartbeatRequest, m.DoneReply),
    (m.PartitionNumberRequest, m.PartitionNumberReply),
    (m.SendRequest, m.SendReply),
    (m.AttachRequest, m.AttachReply),
    (m.PullRequest, m.PullReply),
    (m.AckRequest, m.DoneReply),
    (m.NackRequest, m.NackReply),
    (m.DetachRequest, m.DoneReply),
    (m.LeaseRequest, m.LeaseReply),
    (m.RenewRequest, m.DoneReply),
    (m.ReadRequest, m.ReadReply),
    (q.QueryRequest, q.QueryReply),
    (m.AdminRequest, m.AdminReply),
    (m.RouteRequest, m.RouteReply),
    (m.MemberHeartbeatRequest, m.MemberHeartbeatReply),
    (m.TransactionChecksRequest, m.TransactionChecksReply),
]
#: Kind of a request → kind of its answer. The answer to a failed request is an ``ErrorReply`` instead.
ANSWERS: dict[int, int] = {request.KIND: answer.KIND for request, answer in _ANSWERS}
#: Packet kind → the decoder of its head.
DECODERS: dict[int, Callable[[memoryview | bytes], m.PacketHead]] = {
    kind.KIND: msgspec.msgpack.Decoder(kind).decode for kind in m.PacketHead.__subclasses__()
}
#: The exceptions that a decoder raises for invalid bytes.
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InvalidArgument)

#: The largest head: a reply with half a million ranges.
HEAD_SIZE_MAX = 8 * MIB
#: Limit of heads with values of any type, because each of their bytes can decode to a whole object. No kind has a lower
#: limit.
OPEN_HEAD_SIZE_MAX = 64 * KIB
#: Limit of lease requests. They can name each LP separately, and many times the parked keys of a group, or many
#: sessions. Decoding a larger head would block the server for too long.
LEASE_HEAD_SIZE_MAX = 1 * MIB
#: Limit of requests with ranges: several times the size of ``REQUEST_RANGES_MAX`` ranges with tags, the runs of all LPs
#: and a reason.
RANGES_HEAD_SIZE_MAX = 256 * KIB
#: A longer text of an error is cut, because it may quote a long value.
MESSAGE_LENGTH_MAX = 4_000
_HEAD_SIZES_MAX = {
    m.AdminRequest.KIND: OPEN_HEAD_SIZE_MAX,
    m.ErrorReply.KIND: OPEN_HEAD_SIZE_MAX,
    m.AttachRequest.KIND: RANGES_HEAD_SIZE_MAX,
    m.AckRequest.KIND: RANGES_HEAD_SIZE_MAX,
    m.NackRequest.KIND: RANGES_HEAD_SIZE_MAX,
    m.LeaseRequest.KIND: LEASE_HEAD_SIZE_MAX,
    m.RenewRequest.KIND: LEASE_HEAD_SIZE_MAX,
    # The result may be a listing that fills a packet. It is not decoded here.
    m.AdminReply.KIND: PACKET_SIZE_MAX,
}


#: Encodes a message as the head of its packet.
encode: Callable[[m.PacketHead], bytes] = msgspec.msgpack.Encoder().encode


def decode(kind: int, head: memoryview | bytes) -> m.PacketHead:
    """The message in the head of a packet; raises ``ProtocolError`` for invalid bytes."""
    decoder = DECODERS.get(kind)
    if decoder is None:
        raise ProtocolError(f"packet kind {kind} is not known; the peer may have a newer version of Plait")
    limit = _HEAD_SIZES_MAX.get(kind, HEAD_SIZE_MAX)
    if len(head) > limit:
        raise ProtocolError(f"the head of a packet of kind {kind} has {len(head)} bytes, over the limit of {limit}")
    try:
        return decoder(head)
    except UNDECODABLE as error:
        raise undecodable(kind, error) from None


def undecodable(kind: int, error: Exception) -> ProtocolError:
    """The error for a head that is not a message of its kind."""
    return ProtocolError(f"the head of a packet of kind {kind} does not decode: {error}")


def failure_of(error: PlaitError) -> m.ErrorReply:
    """The reply that reports an error to the client."""
    details = {name: value for name, value in error.details.items() if _plain(value)}
    message = error.message
    if len(message) > MESSAGE_LENGTH_MAX:
        message = message[: MESSAGE_LENGTH_MAX - 3] + "..."
    return m.ErrorReply(error.code, message, details)


def _plain(value: Any) -> bool:
    """Whether the value keeps its type and value over the wire."""
    if isinstance(value, list):
        return all(isinstance(each, int) or _short(each) for each in value)
    return _short(value) if isinstance(value, str) else isinstance(value, int | float | None)


def _short(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MESSAGE_LENGTH_MAX


def error_of(failure: m.ErrorReply) -> PlaitError:
    """The error that a reply reports."""
    error = from_code(failure.code, failure.message)
    # The details are not passed as keyword arguments, because the peer chooses their names.
    error.details = dict(failure.details)
    return error
