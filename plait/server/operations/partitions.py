"""Broker orders of a meta server: open, seal or drop a partition."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from plait.broker.partitions import sealing
from plait.errors import InvalidArgument
from plait.limits import Number
from plait.model import names
from plait.model.settings import SubjectSettings
from plait.storage.catalog import Lps

if TYPE_CHECKING:
    from plait.server.broker_host import BrokerHost as Server

_T = TypeVar("_T")

OPEN: Final = "partition.open"
SEAL: Final = "partition.seal"
DROP: Final = "partition.drop"
#: The orders. The reply is sent when the order is durable.
ORDERS: Final = (OPEN, SEAL, DROP)


class OpenPartition(msgspec.Struct, forbid_unknown_fields=True):
    """Create a partition of a subject if it does not exist, and open it for logical partitions."""

    subject: str
    name: str
    lps: list[Lps]
    version: Number
    settings: SubjectSettings = SubjectSettings()


class SealPartition(msgspec.Struct, forbid_unknown_fields=True):
    """Seal logical partitions of a partition."""

    name: str
    lps: list[Lps]
    version: Number


class DropPartition(msgspec.Struct, forbid_unknown_fields=True):
    """Drop a partition that is no longer in its subject's route, as of a version of the route."""

    subject: str
    name: str
    version: Number


def order(server: Server, operation: str, arguments: dict[str, Any], reply: Callable[[Any], None]) -> None:
    """Execute an order. Calls ``reply`` with the result when it is durable."""
    broker = server.broker
    if operation == SEAL:
        sealed = _checked(operation, arguments, SealPartition)
        sealing.seal(broker, sealed.name, sealed.lps, sealed.version, reply)
        return
    if operation == OPEN:
        opened = _checked(operation, arguments, OpenPartition)
        names.check("subject", opened.subject)
        names.check_partition(opened.name)
        sealing.open_lps(broker, opened.subject, opened.name, opened.lps, opened.version, opened.settings)
    else:
        dropped = _checked(operation, arguments, DropPartition)
        sealing.drop(broker, dropped.subject, dropped.name, dropped.version)
    broker.turn.answer_when_durable(lambda: reply(None))


def _checked(operation: str, arguments: dict[str, Any], kind: type[_T]) -> _T:
    try:
        return msgspec.convert(arguments, kind)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{operation}: {error}") from None
