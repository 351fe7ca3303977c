"""The admin requests that a broker serves, and the function of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from plait.broker.groups import group_settings
from plait.broker.views import group_view, subject_view
from plait.errors import InvalidArgument
from plait.server.broker_host import BrokerHost
from plait.server.operations import (
    dead_letters,
    delayed,
    explanations,
    partitions,
    subjects_and_groups,
    transactions,
)
from plait.wire import messages as m
from plait.wire.admin import cluster as c
from plait.wire.admin import dead_letters as d
from plait.wire.admin import delayed as s
from plait.wire.admin import partitions as p
from plait.wire.admin import recurrences as r
from plait.wire.admin import rewinds as w
from plait.wire.admin import subjects as g
from plait.wire.admin import transactions as t
from plait.wire.admin import why as y
from plait.wire.admin.operation import Operation

#: The functions of operations, which get the broker's host and the request.
_Table = dict[Operation[Any], Callable[..., Any]]

#: Answered at once with the result of the function.
_NOW: Final[_Table] = {
    g.LIST_SUBJECTS: lambda h, _: [subject_view(h.broker, each) for _, each in sorted(h.broker.subjects.items())],
    g.DESCRIBE_SUBJECT: subjects_and_groups.describe_subject,
    g.LIST_GROUPS: subjects_and_groups.list_groups,
    g.DESCRIBE_GROUP: lambda h, r: group_view(h.membership.group(r.subject, r.group), counted=True),
    g.GROUP_BEGAN: lambda h, r: group_settings.began(h.broker, r.partitions, r.group, r.client),
    # Only meta servers store allocations, and without a meta server no partition is ever retired.
    g.FORGET_GROUP: lambda *_: False,
    g.GROUP_REMEMBERED: lambda *_: g.Remembered(0, None),
    g.DESCRIBE_SERVER: lambda h, _: h.describe(),
    c.LIST_BROKERS: subjects_and_groups.list_brokers,
    d.LIST_PARKED: dead_letters.list_parked,
    d.LIST_QUEUES: dead_letters.list_queues,
    d.LIST_LETTERS: dead_letters.list_letters,
    d.COUNT_REASONS: dead_letters.count_reasons,
    s.LIST_DELAYED: delayed.list_,
    s.COUNT_DELAYED: delayed.count,
    t.LIST_TRANSACTIONS: transactions.list_,
    t.SHOW_TRANSACTION: transactions.show,
    p.DESCRIBE_SPANS: partitions.describe_spans,
    p.CUT_SPANS: partitions.cut_spans,
    p.READ_STAGE: partitions.read_stage,
}
#: Answered with the result of the function, after the commit of the turn.
_COMMITTED: Final[_Table] = {
    g.CREATE_SUBJECT: subjects_and_groups.create_subject,
    g.SET_SUBJECT: subjects_and_groups.set_subject,
    g.DELETE_SUBJECT: lambda h, r: h.broker.delete_subject(r.subject),
    g.SET_GROUP_FILTER: subjects_and_groups.set_filter,
    g.PAUSE_GROUP: subjects_and_groups.pause,
    g.SET_RATE: subjects_and_groups.set_rate,
    g.SET_GROUP: lambda h, r: group_view(h.membership.set_group(r.subject, r.group, r)),
    g.DELETE_GROUP: lambda h, r: h.membership.delete(r.subject, r.group),
    d.RESUME_KEYS: partial(dead_letters.unpark, skip=False),
    d.SKIP_KEYS: partial(dead_letters.unpark, skip=True),
    d.RESEND_LETTERS: partial(dead_letters.change, purge=False),
    d.PURGE_LETTERS: partial(dead_letters.change, purge=True),
    s.CANCEL_DELAYED: delayed.cancel,
    s.RESCHEDULE: delayed.reschedule,
    t.BEGIN_TRANSACTION: transactions.begin,
    p.OPEN_STAGE: partitions.open_stage,
    p.DROP_STAGES: partitions.drop_stages,
    p.FORGET_BATCHES: lambda h, r: h.broker.stages.forget(r.query, r.batch),
}
#: Answered when the function calls its third argument, with the result or with an error.
_LATER: Final[_Table] = {
    t.DECIDE_TRANSACTION: transactions.decide,
    p.OPEN_PARTITION: partitions.open_partition,
    p.SEAL_PARTITION: partitions.seal_partition,
    p.DROP_PARTITION: partitions.drop_partition,
    w.REWIND_GROUP: subjects_and_groups.rewind,
    p.COMPLETE_STAGES: partitions.complete,
    p.PUBLISH_STAGES: partitions.publish,
    y.EXPLAIN_MESSAGE: explanations.explain,
}
_OPERATIONS: Final = {operation.name: operation for operation in (*_NOW, *_COMMITTED, *_LATER)}
_OF_META_SERVERS: Final = {
    each.name for module in (c, r) for each in vars(module).values() if isinstance(each, Operation)
}


def run(host: BrokerHost, request: m.AdminRequest, answer: partitions.Answer) -> None:
    """Execute a request. Calls ``answer`` when the result may be sent; raises an error if the request is refused."""
    name = request.operation
    operation = _OPERATIONS.get(name)
    if operation is None:
        if name in _OF_META_SERVERS:
            raise InvalidArgument(f"this is a broker; send {name} to a meta server")
        raise InvalidArgument(f"operation {name!r} is not known; is the client newer than the server?")
    arguments = operation.arguments(request)
    if operation in _LATER:
        _LATER[operation](host, arguments, answer)
    elif operation in _NOW:
        answer(_NOW[operation](host, arguments), None)
    else:
        result = _COMMITTED[operation](host, arguments)
        host.broker.turn.answer_after_commit(partial(answer, result, None))
