"""What a meta server tells a broker: which logical partitions each of its partitions takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from plait import names
from plait.broker import sealing
from plait.errors import InvalidArgument
from plait.storage.catalog import Fence, Lps, SubjectSettings

if TYPE_CHECKING:
    from plait.server.host import Server

SEAL: Final = "partition.seal"


class OpenPartition(msgspec.Struct, forbid_unknown_fields=True):
    """A partition of a subject that takes these logical partitions from now on; it is made if it is not there."""

    subject: str
    name: str
    lps: list[Lps]
    version: int
    settings: SubjectSettings = SubjectSettings()


class SealPartition(msgspec.Struct, forbid_unknown_fields=True):
    """A partition that takes these no more."""

    name: str
    lps: list[Lps]
    version: int


def open_partition(server: Server, request: OpenPartition) -> None:
    names.check("subject", request.subject)
    names.check_partition(request.name)
    sealing.open_lps(server.broker, request.subject, request.name, request.lps, request.version, request.settings)


def seal_request(arguments: dict[str, Any]) -> SealPartition:
    try:
        return msgspec.convert(arguments, SealPartition)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{SEAL}: {error}") from None


def seal(server: Server, request: SealPartition, reply: Callable[[list[Fence]], None]) -> None:
    sealing.seal(server.broker, request.name, request.lps, request.version, reply)
