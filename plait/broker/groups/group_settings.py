"""The settings of groups: creating a group, refusing members that ask for other settings, changing settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgspec

from plait.broker.broker import Broker
from plait.broker.groups.group import AFTER_CLIENT, Group
from plait.broker.groups.ordered.ordered_group import new_group
from plait.broker.groups.shared_group import SharedGroup
from plait.broker.partitions.partition import Partition
from plait.errors import GroupMismatch, InvalidArgument, LimitExceeded
from plait.filter.message_filter import compile_filter
from plait.model import names
from plait.model.filter_terms import FilterTerms
from plait.model.retry_policy import Retry
from plait.model.settings import check_fair_by
from plait.storage.logs.action_log import GroupDefinition


class GroupFilter(NamedTuple):
    """The filter that a member of a group asks for, or that an operator sets."""

    terms: FilterTerms | None
    #: False if the member states no filter: ``terms`` is then the newest filter of the group that it knows.
    stated: bool = False
    #: The version of the newest filter that the member knows.
    version: int = 0


NO_FILTER: Final = GroupFilter(None)


def resolve_start(partition: Partition, start: Any) -> int:
    """The sequence that "earliest", "latest", ["sequence", n] or ["time", microseconds] stands for."""
    match start:
        case "earliest":
            return partition.start
        case "latest":
            return partition.visible
        case ["sequence", int(sequence)] if sequence >= 0:
            return max(partition.start, min(sequence, partition.visible))
        case ["time", int(time)]:
            return partition.sequence_at_time(time)
    raise InvalidArgument(f"start {start!r} is not valid; use 'earliest', 'latest', a sequence or a time")


def group_for(
    broker: Broker, partition: Partition, asked: GroupDefinition, start: Any, wanted: GroupFilter = NO_FILTER
) -> Group:
    """The group that a member asks for.

    If the partition has no group of that name, it is created and begins at ``start`` (or at the earliest message, if
    the partition was added after the group began).

    ``GroupMismatch`` if the group has other settings.
    """
    if wanted.terms is not None:
        compile_filter(wanted.terms)
    group = partition.groups.get(asked.name)
    if group is None:
        version = max(wanted.version, 0 if wanted.terms is None else 1)
        filtered = msgspec.structs.replace(asked, filter=wanted.terms, filter_version=version)
        return _create(broker, partition, filtered, start)
    has = group.definition
    if has.delivery != asked.delivery:
        raise _mismatch(group, f"delivery={has.delivery!r}", repr(asked.delivery), has.delivery, asked.delivery)
    if (has.ordered, has.affinity) != (asked.ordered, asked.affinity):
        sharing, other = names.sharing(has.ordered, has.affinity), names.sharing(asked.ordered, asked.affinity)
        raise _mismatch(group, sharing, other, sharing, other)
    if has.fair_by != asked.fair_by:
        own, other = f"fair_by={has.fair_by!r}", f"fair_by={asked.fair_by!r}"
        raise _mismatch(group, own, other, own, other)
    if wanted.version > has.filter_version or (has.broadcast and wanted.terms != has.filter):
        # The filter was changed while this partition could not be reached, or before the partition was added to the
        # route. The only member of a broadcast group may change its filter at any time.
        _set_filter(broker, group, wanted.terms, max(wanted.version, has.filter_version))
    elif wanted.stated and wanted.terms != has.filter:
        own, other = _described(has.filter), _described(wanted.terms)
        raise _mismatch(group, own, other, own, other)
    return group


def _described(terms: FilterTerms | None) -> str:
    return "no filter" if terms is None else f"the filter {terms}"


def _mismatch(group: Group, shown: str, wanted: str, has: str, asked: str) -> GroupMismatch:
    subject = group.partition.row.subject
    return GroupMismatch(
        f"group {group.name!r} of {subject!r} has {shown}, this member asks for {wanted}; use the same for all members",
        subject=subject,
        group=group.name,
        has=has,
        asked=asked,
    )


def _create(broker: Broker, partition: Partition, asked: GroupDefinition, start: Any) -> Group:
    if asked.ordered and (asked.broadcast or asked.delivery != "at_least_once"):
        raise InvalidArgument(
            "an ordered group cannot be a broadcast group, nor have delivery='at_most_once'; name a group and use "
            "'at_least_once'"
        )
    if asked.fair_by is not None and (asked.ordered or asked.broadcast):
        raise _refused_fairness(asked.fair_by)
    if asked.affinity and not asked.ordered:
        raise InvalidArgument("an affinity group needs locks; attach with ordered=True")
    if len(broker.catalog.groups) >= broker.limits.groups:
        raise LimitExceeded(
            f"group limit reached ({broker.limits.groups} per broker, limit `groups`); delete groups or raise it",
            limit="groups",
            value=broker.limits.groups,
        )
    if asked.began and partition.row.since > asked.began:
        # The partition accepted its first rows after the group began.
        start = "earliest"
    elif start is None:
        start = "latest" if asked.broadcast else "earliest"
    definition = msgspec.structs.replace(asked, id=broker.catalog.next_group, start=resolve_start(partition, start))
    broker.catalog.next_group += 1
    group = new_group(definition, partition, broker.limits, broker.turn)
    broker.catalog.add_group(group)
    broker.turn.define(definition)
    broker.turn.touch(partition)
    return group


def began(broker: Broker, partitions: Iterable[str], group_name: str | None, client: str) -> int | None:
    """The oldest route version at which a group began on one of these partitions; None: no partition has it."""
    name = names.of_group(group_name, client)
    found = [broker.subjects[each] for each in partitions if each in broker.subjects]
    return min((each.groups[name].definition.began for each in found if name in each.groups), default=None)


def change_retry(broker: Broker, group: Group, client: str, retry: Retry) -> None:
    """Change the retry policy as a member asks; ``GroupMismatch`` while another member is online."""
    others = [each for each in group.consumers.values() if each.client.partition(AFTER_CLIENT)[0] != client]
    if any(consumer.online for consumer in others):
        raise _mismatch(group, f"retry policy {group.retry}", str(retry), str(group.retry), str(retry))
    set_retry(broker, group, retry)


def set_retry(broker: Broker, group: Group, retry: Retry) -> None:
    """Change the retry policy."""
    group.redefine(msgspec.structs.replace(group.definition, retry=retry))
    broker.turn.define(group.definition)
    broker.turn.touch(group.partition)


def _refused_fairness(fair_by: str) -> InvalidArgument:
    return InvalidArgument(
        f"fair_by={fair_by!r} is for shared groups; ordered, affinity and broadcast groups have none"
    )


def set_fair_by(broker: Broker, group: Group, fair_by: str | None) -> None:
    """Change what identifies a tenant; None: the group is not fair."""
    if fair_by is not None:
        check_fair_by(fair_by)
        if not isinstance(group, SharedGroup) or group.definition.broadcast:
            raise _refused_fairness(fair_by)
    group.redefine(msgspec.structs.replace(group.definition, fair_by=fair_by))
    broker.turn.define(group.definition)
    broker.turn.touch(group.partition)


def set_group_filter(broker: Broker, group: Group, wanted: GroupFilter) -> Group:
    """Change the filter as an operator asks. ``GroupMismatch`` if it was changed at the same time.

    The sessions of the members end, so that they attach again: members that state another filter are refused.
    """
    if wanted.terms is not None:
        compile_filter(wanted.terms)
    has = group.definition
    if wanted.version < has.filter_version or (wanted.version == has.filter_version and wanted.terms != has.filter):
        raise GroupMismatch(
            f"the filter of group {group.name!r} of {group.partition.row.subject!r} was changed at the same time; "
            "read it again and repeat the change",
            subject=group.partition.row.subject,
            group=group.name,
            has=_described(has.filter),
            asked=_described(wanted.terms),
        )
    _set_filter(broker, group, wanted.terms, wanted.version)
    for consumer in group.consumers.values():
        broker.sessions.pop(consumer.session, None)
        consumer.connected = False
    for waiter in list(group.waiters):
        waiter.time_out()
    return group


def _set_filter(broker: Broker, group: Group, terms: FilterTerms | None, version: int) -> None:
    group.redefine(msgspec.structs.replace(group.definition, filter=terms, filter_version=version))
    broker.turn.define(group.definition)
    broker.turn.touch(group.partition)
