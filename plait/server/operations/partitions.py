"""Broker orders of a meta server about partitions, and requests of the Spark sink's tasks and drivers about stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from plait.broker.partitions import sealing
from plait.errors import InvalidArgument, PlaitError
from plait.limits import MIB, STAGES_PAGE_MAX
from plait.model import names
from plait.server.broker_host import BrokerHost
from plait.storage.catalog import Stage
from plait.wire.admin.partitions import (
    DropPartition,
    DropStages,
    NameStages,
    OpenPartition,
    OpenStage,
    ReadStage,
    SealPartition,
)

#: Called once with the result, or with the error.
Answer = Callable[[Any, PlaitError | None], None]
#: Bytes of a stage that one request reads.
READ_SIZE: Final = 4 * MIB
_NUMBER_MAX: Final = 1 << 63


def open_partition(host: BrokerHost, request: OpenPartition, answer: Answer) -> None:
    names.check("subject", request.subject)
    names.check_partition(request.name)
    sealing.open_lps(host.broker, request.subject, request.name, request.lps, request.version, request.settings)
    host.broker.turn.answer_when_durable(lambda: answer(None, None))


def seal_partition(host: BrokerHost, request: SealPartition, answer: Answer) -> None:
    sealing.seal(host.broker, request.name, request.lps, request.version, lambda fences: answer(fences, None))


def drop_partition(host: BrokerHost, request: DropPartition, answer: Answer) -> None:
    sealing.drop(host.broker, request.subject, request.name, request.version)
    host.broker.turn.answer_when_durable(lambda: answer(None, None))


def open_stage(host: BrokerHost, request: OpenStage) -> int:
    """Answered after the commit: after a crash an uncommitted number is given to another partition."""
    names.check_partition(request.name)
    names.check("query", request.query)
    _check_numbers([request.producer, request.batch])
    stage = Stage(request.producer, request.query, request.batch, request.delayed)
    return host.broker.stages.open(request.name, stage).id


def complete(host: BrokerHost, request: NameStages, answer: Answer) -> None:
    host.broker.stages.complete(_checked(request), lambda error: answer(None, error))


def publish(host: BrokerHost, request: NameStages, answer: Answer) -> None:
    host.broker.publisher.publish(_checked(request), lambda error: answer(None, error))


def drop_stages(host: BrokerHost, request: DropStages) -> int:
    _check_numbers(request.producers)
    return host.broker.stages.drop(request.producers)


def read(host: BrokerHost, request: ReadStage) -> Any:
    _check_numbers([request.producer, request.start])
    return host.broker.stages.read(request.producer, request.start, READ_SIZE)


def _checked(request: NameStages) -> list[tuple[int, int]]:
    if len(request.stages) > STAGES_PAGE_MAX:
        raise InvalidArgument(f"{len(request.stages)} stages exceed the limit of {STAGES_PAGE_MAX} per request")
    _check_numbers([number for stage in request.stages for number in stage])
    return request.stages


def _check_numbers(numbers: list[int]) -> None:
    for number in numbers:
        if not 0 <= number < _NUMBER_MAX:
            raise InvalidArgument(f"{number} is invalid; use 0 to {_NUMBER_MAX - 1}")
