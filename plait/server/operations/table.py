"""The admin requests that a broker serves, and the function of each."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from plait.errors import InvalidArgument
from plait.server.operations import (
    dead_letters,
    delayed,
    parked_keys,
    partition_spans,
    partitions,
    stages,
    subjects_and_groups,
)
from plait.wire import messages as m
from plait.wire.admin import cluster as c
from plait.wire.admin import dead_letters as d
from plait.wire.admin import delayed as s
from plait.wire.admin import partitions as p
from plait.wire.admin import subjects as g
from plait.wire.admin.operation import Operation

if TYPE_CHECKING:
    from plait.server.broker_host import BrokerHost as Server


class Reply(Enum):
    """When a request is answered."""

    NOW = "with the result of its function"
    COMMITTED = "with the result of its function, after the commit of the turn"
    LATER = "when its function calls its third argument, with the result or with an error"


class OperationHandler(NamedTuple):
    """The function of an operation: it gets the server and the request."""

    operation: Operation[Any]
    call: Callable[..., Any]
    reply: Reply = Reply.NOW


_HANDLERS: Final = {
    handler.operation.name: handler
    for handler in (
        OperationHandler(g.LIST_SUBJECTS, subjects_and_groups.list_subjects),
        OperationHandler(g.DESCRIBE_SUBJECT, subjects_and_groups.describe_subject),
        OperationHandler(g.CREATE_SUBJECT, subjects_and_groups.create_subject, Reply.COMMITTED),
        OperationHandler(g.SET_SUBJECT, subjects_and_groups.set_subject, Reply.COMMITTED),
        OperationHandler(g.DELETE_SUBJECT, subjects_and_groups.delete_subject, Reply.COMMITTED),
        OperationHandler(g.LIST_GROUPS, subjects_and_groups.list_groups),
        OperationHandler(g.DESCRIBE_GROUP, subjects_and_groups.describe_group),
        OperationHandler(g.GROUP_BEGAN, subjects_and_groups.began),
        OperationHandler(g.RESET_GROUP, subjects_and_groups.reset_group, Reply.COMMITTED),
        OperationHandler(g.SET_GROUP, subjects_and_groups.set_group, Reply.COMMITTED),
        OperationHandler(g.DELETE_GROUP, subjects_and_groups.delete_group, Reply.COMMITTED),
        OperationHandler(g.FORGET_GROUP, subjects_and_groups.forget_group),
        OperationHandler(g.GROUP_REMEMBERED, subjects_and_groups.remembered),
        OperationHandler(g.DESCRIBE_SERVER, subjects_and_groups.describe_server),
        OperationHandler(c.LIST_BROKERS, subjects_and_groups.list_brokers),
        OperationHandler(d.LIST_PARKED, parked_keys.list_parked),
        OperationHandler(d.RESUME_KEYS, parked_keys.resume, Reply.COMMITTED),
        OperationHandler(d.SKIP_KEYS, parked_keys.skip, Reply.COMMITTED),
        OperationHandler(d.LIST_QUEUES, dead_letters.list_queues),
        OperationHandler(d.LIST_LETTERS, dead_letters.list_letters),
        OperationHandler(d.COUNT_REASONS, dead_letters.count_reasons),
        OperationHandler(d.RESEND_LETTERS, dead_letters.resend, Reply.COMMITTED),
        OperationHandler(d.PURGE_LETTERS, dead_letters.purge, Reply.COMMITTED),
        OperationHandler(s.CANCEL_DELAYED, delayed.cancel, Reply.COMMITTED),
        OperationHandler(s.RESCHEDULE, delayed.reschedule, Reply.COMMITTED),
        OperationHandler(s.LIST_DELAYED, delayed.list_),
        OperationHandler(s.COUNT_DELAYED, delayed.count),
        OperationHandler(p.DESCRIBE_SPANS, partition_spans.describe),
        OperationHandler(p.CUT_SPANS, partition_spans.cut),
        OperationHandler(p.OPEN_PARTITION, partitions.open_partition, Reply.LATER),
        OperationHandler(p.SEAL_PARTITION, partitions.seal, Reply.LATER),
        OperationHandler(p.DROP_PARTITION, partitions.drop, Reply.LATER),
        OperationHandler(p.OPEN_STAGE, stages.open_stage, Reply.LATER),
        OperationHandler(p.COMPLETE_STAGES, stages.complete, Reply.LATER),
        OperationHandler(p.PUBLISH_STAGES, stages.publish, Reply.LATER),
        OperationHandler(p.DROP_STAGES, stages.drop, Reply.LATER),
        OperationHandler(p.FORGET_BATCHES, stages.forget, Reply.LATER),
        OperationHandler(p.READ_STAGE, stages.read, Reply.LATER),
    )
}
_OF_META_SERVERS: Final = {
    operation.name
    for operation in (
        c.DESCRIBE_ROUTE,
        c.EXPAND_SUBJECT,
        c.DESCRIBE_BROKERS,
        c.SET_BROKER_STATE,
        c.DESCRIBE_ALLOCATION,
        c.DECIDE_BATCH,
        c.VETO_BATCH,
        c.EXCHANGE_STAGES,
        c.BATCH_DONE,
        c.UNDONE_BATCHES,
    )
}


def run(server: Server, request: m.AdminRequest, answer: stages.Answer) -> None:
    """Execute a request. Calls ``answer`` when the result may be sent; raises an error if the request is refused."""
    name = request.operation
    if name in _OF_META_SERVERS:
        raise InvalidArgument(f"this is a broker; send {name} to a meta server")
    handler = _HANDLERS.get(name)
    if handler is None:
        raise InvalidArgument(f"operation {name!r} is not known; is the client newer than the server?")
    arguments = handler.operation.arguments(request)
    if handler.reply is Reply.LATER:
        handler.call(server, arguments, answer)
        return
    result = handler.call(server, arguments)
    if handler.reply is Reply.NOW:
        answer(result, None)
    else:
        server.broker.turn.answer_after_commit(lambda: answer(result, None))
