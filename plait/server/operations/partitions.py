"""Broker orders of a meta server: open, seal or drop a partition. They are answered when they are durable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.broker.partitions import sealing
from plait.model import names
from plait.wire.admin.partitions import DropPartition, OpenPartition, SealPartition

if TYPE_CHECKING:
    from plait.server.broker_host import BrokerHost as Server
    from plait.server.operations.stages import Answer


def open_partition(server: Server, request: OpenPartition, answer: Answer) -> None:
    names.check("subject", request.subject)
    names.check_partition(request.name)
    sealing.open_lps(server.broker, request.subject, request.name, request.lps, request.version, request.settings)
    server.broker.turn.answer_when_durable(lambda: answer(None, None))


def seal(server: Server, request: SealPartition, answer: Answer) -> None:
    sealing.seal(server.broker, request.name, request.lps, request.version, lambda fences: answer(fences, None))


def drop(server: Server, request: DropPartition, answer: Answer) -> None:
    sealing.drop(server.broker, request.subject, request.name, request.version)
    server.broker.turn.answer_when_durable(lambda: answer(None, None))
