"""What a meta server tells a broker: which logical partitions each of its partitions takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from plait.broker.partitions import sealing
from plait.errors import InvalidArgument
from plait.limits import Number
from plait.model import names
from plait.storage.catalog import Lps, SubjectSettings

if TYPE_CHECKING:
    from plait.server.broker_server import Server

_T = TypeVar("_T")

OPEN: Final = "partition.open"
SEAL: Final = "partition.seal"
DROP: Final = "partition.drop"
#: Those that are answered when they are durable.
ORDERS: Final = (OPEN, SEAL, DROP)


class OpenPartition(msgspec.Struct, forbid_unknown_fields=True):
    """A partition of a subject that takes these logical partitions from now on; it is made if it is not there."""

    subject: str
    name: str
    lps: list[Lps]
    version: Number
    settings: SubjectSettings = SubjectSettings()


class SealPartition(msgspec.Struct, forbid_unknown_fields=True):
    """A partition that takes these no more."""

    name: str
    lps: list[Lps]
    version: Number


class DropPartition(msgspec.Struct, forbid_unknown_fields=True):
    """A partition that nothing leads to any more, as of a version of the route."""

    subject: str
    name: str
    version: Number


def order(server: Server, operation: str, arguments: dict[str, Any], reply: Callable[[Any], None]) -> None:
    """Carry out what a meta server asks for; ``reply`` gets the result once it is durable."""
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
    broker.answer_when_durable(lambda: reply(None))


def _checked(operation: str, arguments: dict[str, Any], kind: type[_T]) -> _T:
    try:
        return msgspec.convert(arguments, kind)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{operation}: {error}") from None
