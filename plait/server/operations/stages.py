"""Requests of the Spark sink's tasks and drivers: open, complete, publish, read and drop stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from plait.errors import InvalidArgument, PlaitError
from plait.limits import MIB, STAGES_PAGE_MAX
from plait.model import names
from plait.storage.catalog import Stage
from plait.wire.admin.partitions import DropStages, ForgetBatches, NameStages, OpenStage, ReadStage

if TYPE_CHECKING:
    from plait.server.broker_host import BrokerHost as Server

#: Called once with the result, or with the error.
Answer = Callable[[Any, PlaitError | None], None]
#: Bytes of a stage that one request reads.
READ_SIZE: Final = 4 * MIB
_NUMBER_MAX: Final = 1 << 63


def open_stage(server: Server, request: OpenStage, answer: Answer) -> None:
    names.check_partition(request.name)
    names.check("query", request.query)
    _check_numbers([request.producer, request.batch])
    stage = Stage(request.producer, request.query, request.batch, request.delayed)
    partition = server.broker.stages.open(request.name, stage)
    # Reply after the commit: after a crash an uncommitted number is given to another partition.
    server.broker.turn.answer_after_commit(lambda: answer(partition.id, None))


def complete(server: Server, request: NameStages, answer: Answer) -> None:
    server.broker.stages.complete(_checked(request), lambda error: answer(None, error))


def publish(server: Server, request: NameStages, answer: Answer) -> None:
    server.broker.publisher.publish(_checked(request), lambda error: answer(None, error))


def drop(server: Server, request: DropStages, answer: Answer) -> None:
    _check_numbers(request.producers)
    count = server.broker.stages.drop(request.producers)
    server.broker.turn.answer_after_commit(lambda: answer(count, None))


def forget(server: Server, request: ForgetBatches, answer: Answer) -> None:
    count = server.broker.stages.forget(request.query, request.batch)
    server.broker.turn.answer_after_commit(lambda: answer(count, None))


def read(server: Server, request: ReadStage, answer: Answer) -> None:
    _check_numbers([request.producer, request.start])
    answer(server.broker.stages.read(request.producer, request.start, READ_SIZE), None)


def _checked(request: NameStages) -> list[tuple[int, int]]:
    if len(request.stages) > STAGES_PAGE_MAX:
        raise InvalidArgument(f"{len(request.stages)} stages exceed the limit of {STAGES_PAGE_MAX} per request")
    _check_numbers([number for stage in request.stages for number in stage])
    return request.stages


def _check_numbers(numbers: list[int]) -> None:
    for number in numbers:
        if not 0 <= number < _NUMBER_MAX:
            raise InvalidArgument(f"{number} is invalid; use 0 to {_NUMBER_MAX - 1}")
