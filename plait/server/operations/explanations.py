"""Explanations: where a message is for a group, and what happened to it. The action log is read off the loop."""

from __future__ import annotations

import asyncio

import msgspec

from plait import tasks
from plait.broker.query.history import ActionPiece, Concerned, HistoryReader
from plait.broker.query.message_state import cursor_of, key_of, state_of
from plait.errors import InvalidArgument, PlaitError, Unavailable
from plait.frame.header import SEQUENCE_MAX
from plait.model import names
from plait.server.broker_host import BrokerHost
from plait.server.operations.partitions import Answer
from plait.wire.admin.why import ExplainMessage, MessageState


def explain(host: BrokerHost, request: ExplainMessage, answer: Answer) -> None:
    """Answers when the history is read."""
    names.check_partition(request.subject)
    names.check_group(request.group)
    if not 0 <= request.sequence < SEQUENCE_MAX:
        raise InvalidArgument(f"sequence {request.sequence} is out of range; use 0 to {SEQUENCE_MAX - 1}")
    group = host.membership.group(request.subject, request.group)
    row = key_of(host.broker, group, request.sequence)
    cursor = cursor_of(group, row)
    state = state_of(host.broker, group, request.sequence, row)
    _, record = group.partition.consume_log.locate(request.sequence)
    message = Concerned(
        group.id,
        request.sequence,
        record.time if record is not None and record.base <= request.sequence else 0,
        -1 if row is None else row.lp,
        None if row is None else row.key,
        0 if cursor is None else cursor.id,
        0 if cursor is None else cursor.owner,
    )
    pieces = [ActionPiece(each.view, each.written - each.base) for each in host.broker.action_log.segments]
    reader = HistoryReader(pieces, message, ordered=group.definition.ordered)
    clients = {consumer.id: consumer.client for consumer in group.consumers.values()}
    tasks.start(
        _read(host, reader, state, clients, answer),
        "plait-why",
        failed=lambda error: answer(None, tasks.error_of(error)),
    )


async def _read(
    host: BrokerHost, reader: HistoryReader, state: MessageState, clients: dict[int, str], answer: Answer
) -> None:
    try:
        while await asyncio.get_running_loop().run_in_executor(host.index_thread, reader.step):
            pass
    except RuntimeError:
        answer(None, Unavailable("the broker stops; ask again"))
        return
    except PlaitError as error:
        answer(None, error)
        return
    rows = reader.rows(clients)
    if state.state == "before" and rows:
        # A rewind brought it to the group.
        state = msgspec.structs.replace(state, state="done")
    answer(
        msgspec.structs.replace(state, history=rows, partial=reader.partial, reached=reader.reached),
        None,
    )
