"""Who consumes: attaching, heartbeats, losing and forgetting consumers and groups.

A consumer that was not heard from for ``consumer_lost_seconds`` is lost: what it held goes to the others at once. It
may come back under the same client id; then it names what is still in its hands (R13).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from plait.broker.broker import Broker
from plait.broker.groups.ordered_group import OrderedGroup, new_group
from plait.broker.groups.shared_group import AFTER_CLIENT, AttachedConsumer, Group
from plait.broker.partitions.partition import Partition
from plait.broker.session_token import proof_of, proves
from plait.errors import GroupBusy, GroupMismatch, GroupNotFound, InvalidArgument, LimitExceeded, StaleSession
from plait.model import names
from plait.model.retry_policy import Retry
from plait.storage.logs.action_log import Action, ConsumerDefinition, GroupDefinition

log = logging.getLogger("plait.broker")

Delivery = Literal["at_least_once", "at_most_once"]

#: Partitions that are looked at in one turn for consumers and groups to forget.
STEP_PARTITIONS = 1_000


def resolve_start(partition: Partition, start: Any) -> int:
    """A sequence for "earliest", "latest", ["sequence", n] or ["time", microseconds]."""
    match start:
        case "earliest":
            return partition.start
        case "latest":
            return partition.visible
        case ["sequence", int(sequence)] if sequence >= 0:
            return max(partition.start, min(sequence, partition.visible))
        case ["time", int(time)]:
            return partition.sequence_at_time(time)
    raise InvalidArgument(f"start {start!r} is not 'earliest', 'latest', a sequence or a time")


class Attachments:
    """The consumers of a broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        # A restart takes nothing from consumers that come back in time.
        now = broker.clock.monotonic()
        self._online: set[AttachedConsumer] = set()
        #: Those of ordered groups, whose leases count: looked at every second, as the others are.
        self._leased: set[AttachedConsumer] = set()
        for partition in broker.partitions.values():
            for group in partition.groups.values():
                for consumer in group.consumers.values():
                    consumer.heard = now
                    consumer.leased_until = now + broker.leases.longest
                    if isinstance(group, OrderedGroup):
                        holds = consumer.id in group.locks.unheard
                    else:
                        holds = consumer.id in group.pull_log.held
                    if holds:
                        consumer.online = True
                        self._is_online(consumer)

    def _is_online(self, consumer: AttachedConsumer) -> None:
        self._online.add(consumer)
        if consumer.group.definition.ordered:
            self._leased.add(consumer)

    def attach(
        self,
        subject: str,
        group_name: str | None,
        client: str,
        *,
        start: Any = None,
        delivery: Delivery = "at_least_once",
        holds: list[tuple[int, int, int]] | None = None,
        holds_of: int = 0,
        retry: Retry | None = None,
        ordered: bool = False,
        affinity: bool = False,
        token: int = 0,
        began: int = 0,
    ) -> AttachedConsumer:
        """Make ``client`` a member of the group; no group name: broadcast. The consumer has a new session.

        ``holds`` is of partition ``holds_of`` (0: of the present one). Without ``retry`` the group's holds.
        ``affinity`` is a kind of ``ordered``, in which what fails holds nothing back. ``token`` is the secret of an
        ordered member: only with it an earlier session of the same client id is continued. ``began`` is the version of
        the route that the group began with: where the partition took its first rows later, ``start`` is not for it.
        """
        broker = self._broker
        broker.refuse_when_stalled()
        partition = broker.partition_of(subject)
        broadcast = group_name is None
        name = names.of_group(group_name, client)
        group = partition.groups.get(name)
        if group is None:
            if ordered and (broadcast or delivery != "at_least_once"):
                raise InvalidArgument("an ordered group is neither broadcast nor delivered at most once")
            if affinity and not ordered:
                raise InvalidArgument("affinity goes by locks, which only ordered members ask for")
            group = self._create(
                partition,
                name,
                "earliest" if began and partition.row.since > began else start,
                delivery,
                retry,
                broadcast=broadcast,
                ordered=ordered,
                affinity=affinity,
                began=began,
            )
        elif group.definition.delivery != delivery:
            raise GroupMismatch(
                f"group {name!r} of {subject!r} has delivery={group.definition.delivery!r}, "
                f"this member asks for {delivery!r}; use the same for all members",
                subject=subject,
                group=name,
                has=group.definition.delivery,
                asked=delivery,
            )
        elif (group.definition.ordered, group.definition.affinity) != (ordered, affinity):
            raise GroupMismatch(
                f"group {name!r} of {subject!r} has "
                f"{names.sharing(group.definition.ordered, group.definition.affinity)}, "
                f"this member asks for {names.sharing(ordered, affinity)}; use the same for all members",
                subject=subject,
                group=name,
                has=names.sharing(group.definition.ordered, group.definition.affinity),
                asked=names.sharing(ordered, affinity),
            )
        consumer = group.consumers.get(client)
        now = broker.clock.monotonic()
        if consumer is not None and not proves(token, consumer.proof):
            if consumer.connected and now - consumer.heard < broker.limits.consumer_lost_seconds:
                raise GroupBusy(
                    f"client {client!r} is attached to group {name!r} of {subject!r} already; "
                    "give every process a client id of its own",
                    subject=subject,
                    group=name,
                    client=client,
                )
            consumer = self._another(consumer, now)
        proof = proof_of(token)
        if consumer is None:
            if len(self._online) >= broker.limits.consumers:
                raise LimitExceeded(
                    f"consumer limit reached ({broker.limits.consumers} per broker, attached or lost a moment ago): "
                    "close idle consumers, or raise the limit 'consumers'",
                    limit="consumers",
                    value=broker.limits.consumers,
                )
            consumer = AttachedConsumer(broker.next_consumer, group, client, now)
            broker.next_consumer += 1
            self._define(consumer, client, proof)
        elif proof != consumer.proof:
            self._define(consumer, client, proof)
        if retry is not None and retry != group.retry:
            self._change_retry(group, client, retry)
        self._drop_waiters(group, consumer)
        group.reclaim(consumer, holds or [] if holds_of in (0, partition.id) else [], broker, broker.clock.now())
        consumer.online = consumer.connected = True
        consumer.leased_until = max(consumer.leased_until, now + broker.leases.longest)
        self._is_online(consumer)
        consumer.heard = now
        group.used = broker.clock.now()
        broker.new_session(consumer)
        broker.wake_group(group)
        return consumer

    def _another(self, consumer: AttachedConsumer, now: float) -> AttachedConsumer | None:
        """Another process comes under the name of a consumer, or the same without proof; the consumer that it is to be.

        What the earlier one has locks of it may handle until its lease is over (R28). It keeps them under another name
        until then, and the new one is a consumer of its own (None) that waits for them.
        """
        group = consumer.group
        if not isinstance(group, OrderedGroup) or not group.locks.had_by(consumer.id):
            return consumer
        if consumer.leased_until <= now:
            self._lose(group, consumer)
            return None
        self._drop_waiters(group, consumer)
        self._broker.sessions.pop(consumer.session, None)
        consumer.connected = False
        self._define(consumer, f"{consumer.client}{AFTER_CLIENT}{consumer.id}", consumer.proof)
        return None

    def _define(self, consumer: AttachedConsumer, client: str, proof: int) -> None:
        """The consumer is a member under this name from now on."""
        consumer.group.redefine_consumer(consumer, client, proof)
        self._broker.define(ConsumerDefinition(consumer.id, consumer.group.id, client, proof))
        self._broker.touch(consumer.group.partition)

    def began(self, partitions: Iterable[str], group_name: str | None, client: str) -> int | None:
        """The oldest version of the route that a group began with at one of these; None: none of them knows it."""
        name = names.of_group(group_name, client)
        found = [self._broker.subjects[each] for each in partitions if each in self._broker.subjects]
        versions = [each.groups[name].definition.began for each in found if name in each.groups]
        return min(versions, default=None)

    def _create(
        self,
        partition: Partition,
        name: str,
        start: Any,
        delivery: Delivery,
        retry: Retry | None,
        *,
        broadcast: bool,
        ordered: bool,
        affinity: bool,
        began: int,
    ) -> Group:
        broker = self._broker
        if broker.group_count >= broker.limits.groups:
            raise LimitExceeded(
                f"this broker has its {broker.limits.groups} groups; remove some or raise the limit",
                limit="groups",
                value=broker.limits.groups,
            )
        if start is None:
            start = "latest" if broadcast else "earliest"
        definition = GroupDefinition(
            broker.next_group,
            partition.id,
            name,
            resolve_start(partition, start),
            broadcast,
            delivery,
            broker.clock.now(),
            retry,
            ordered,
            affinity,
            began,
        )
        broker.next_group += 1
        group = new_group(definition, partition, broker.limits, broker)
        partition.add_group(group)
        broker.add_group(group)
        broker.define(definition)
        broker.touch(partition)
        return group

    def _change_retry(self, group: Group, client: str, retry: Retry) -> None:
        """The first member to come may say it anew; while there are others, what they said holds."""
        others = [each for each in group.consumers.values() if each.client.partition(AFTER_CLIENT)[0] != client]
        if any(consumer.online for consumer in others):
            raise GroupMismatch(
                f"group {group.name!r} of {group.partition.row.subject!r} retries by {group.retry}, "
                f"this member asks for {retry}; use the same for all members",
                subject=group.partition.row.subject,
                group=group.name,
                has=str(group.retry),
                asked=str(retry),
            )
        self._set_retry(group, retry)

    def _set_retry(self, group: Group, retry: Retry) -> None:
        group.redefine(msgspec.structs.replace(group.definition, retry=retry))
        self._broker.define(group.definition)
        self._broker.touch(group.partition)

    def session(self, number: int) -> AttachedConsumer:
        """The consumer of a session, heard from just now."""
        consumer = self._broker.sessions.get(number)
        if consumer is None:
            raise StaleSession("this consumer was given up (out of contact or attached elsewhere); attach again")
        consumer.heard = self._broker.clock.monotonic()
        return consumer

    def detach(self, consumer: AttachedConsumer) -> None:
        """The consumer leaves in order: what it holds goes back at once."""
        group = consumer.group
        self._drop_waiters(group, consumer)
        self._broker.sessions.pop(consumer.session, None)
        self._online.discard(consumer)
        self._leased.discard(consumer)
        consumer.connected = False
        group.offline(consumer, self._broker, self._broker.clock.now())
        self._forget(consumer)
        self._broker.wake_group(group)

    def _forget(self, consumer: AttachedConsumer) -> None:
        """A consumer that holds nothing is not remembered: every segment of the action log begins with all of them."""
        consumer.group.remove(consumer)
        self._broker.event(Action.FORGET_CONSUMER, consumer.group, consumer.id, 0, 0, 0)

    def disconnected(self, consumer: AttachedConsumer, session: int) -> None:
        """The connection is gone; the consumer has until the lost time to come back."""
        if consumer.session == session:
            self._drop_waiters(consumer.group, consumer)
            consumer.connected = False
            self._broker.sessions.pop(session, None)

    def end_pulls(self, consumer: AttachedConsumer) -> None:
        """It wants nothing more at present: its pulls that wait are answered with nothing."""
        for waiter in [waiter for waiter in consumer.group.waiters if waiter.consumer is consumer]:
            waiter.time_out()

    def _drop_waiters(self, group: Group, consumer: AttachedConsumer) -> None:
        for waiter in [waiter for waiter in group.waiters if waiter.consumer is consumer]:
            waiter.leave()

    def lose_silent(self) -> list[tuple[AttachedConsumer, int]]:
        """Give up who was not heard from; (consumer, messages returned) of each. Call it every second."""
        broker = self._broker
        now = broker.clock.monotonic()
        deadline = now - broker.limits.consumer_lost_seconds
        # Who has locks may count on them until its lease is over, whether it is heard from or not.
        silent = [consumer for consumer in self._online if consumer.heard < deadline and consumer not in self._leased]
        silent += [consumer for consumer in self._leased if consumer.leased_until <= now]
        silent.sort(key=lambda consumer: consumer.id)
        lost = []
        for consumer in silent:
            try:
                lost.append((consumer, self._lose(consumer.group, consumer)))
            except Exception:  # noqa: BLE001 (it is logged there)
                broker.waking.failed(consumer.group)
        return lost

    @property
    def next_lease_end(self) -> float | None:
        """When the first lease is over, on the monotonic clock."""
        return min((consumer.leased_until for consumer in self._leased), default=None)

    def _lose(self, group: Group, consumer: AttachedConsumer) -> int:
        self._drop_waiters(group, consumer)
        self._broker.sessions.pop(consumer.session, None)
        self._online.discard(consumer)
        self._leased.discard(consumer)
        consumer.connected = False
        before = group.died_count
        returned = group.lost(consumer, self._broker, self._broker.clock.now())
        if group.died_count > before:
            log.warning(
                "%d messages of %s went to the dead letters of group %s: consumer %s was lost at their last attempt",
                group.died_count - before,
                group.partition.row.name,
                group.name,
                consumer.client,
            )
        self._forget(consumer)
        self._broker.wake_group(group)
        return returned

    def forget_idle(self) -> int:
        """Drop consumers that a start found and that did not return, and unused broadcast groups; how many."""
        return sum(self.forget_idle_steps())

    def forget_idle_steps(self) -> Iterator[int]:
        """The same in steps of one loop turn each; how many each of them dropped."""
        partitions = list(self._broker.partitions.values())
        for start in range(0, len(partitions), STEP_PARTITIONS):
            yield sum(map(self._forget_idle, partitions[start : start + STEP_PARTITIONS]))

    def _forget_idle(self, partition: Partition) -> int:
        broker = self._broker
        if broker.failed is not None or broker.partitions.get(partition.id) is not partition:
            return 0
        limit = broker.limits.group_forget_seconds
        now, wall = broker.clock.monotonic(), broker.clock.now()
        deadline = now - broker.limits.consumer_lost_seconds
        idle: list[Group] = []
        gone: list[AttachedConsumer] = []
        for group in partition.groups.values():
            gone += [each for each in group.consumers.values() if not each.online and each.heard < deadline]
            if group.definition.broadcast and (wall - group.used) / 1_000_000 > limit:
                idle.append(group)
        for consumer in gone:
            self._forget(consumer)
        unused = [group for group in idle if not group.consumers]
        for group in unused:
            self.remove_group(group)
        return len(gone) + len(unused)

    # --- administration -------------------------------------------------------------------------

    def group(self, subject: str, name: str) -> Group:
        """A group that exists, or ``GroupNotFound``."""
        partition = self._broker.partition_of(subject, create=False)
        group = partition.groups.get(name)
        if group is None:
            known = ", ".join(sorted(partition.groups)[:10]) or "none"
            raise GroupNotFound(
                f"subject {subject!r} has no group {name!r}; it has: {known}", subject=subject, group=name
            )
        return group

    def reset(self, subject: str, name: str, start: Any) -> int:
        """Set a group's position; only while no consumer is online. The sequence it goes on from."""
        group = self._idle(subject, name)
        sequence = resolve_start(group.partition, start)
        group.reset(sequence, self._broker)
        return sequence

    def set_retry(self, subject: str, name: str, retry: Retry) -> Group:
        """Change how a group retries; only while no consumer is online, as members that name a policy agree on it."""
        group = self._idle(subject, name)
        if retry != group.retry:
            self._set_retry(group, retry)
        return group

    def delete(self, subject: str, name: str) -> None:
        """Forget an idle group, its position and its dead letters."""
        self._broker.refuse_when_stalled()
        self.remove_group(self._idle(subject, name))
        self._broker.retention_wanted = True

    def _idle(self, subject: str, name: str) -> Group:
        """A group that exists and has no consumer online, or ``GroupBusy``."""
        group = self.group(subject, name)
        online = [consumer.client for consumer in group.consumers.values() if consumer.connected]
        if online:
            named = ", ".join(online[:3])
            raise GroupBusy(
                f"group {name!r} of {subject!r} has {names.counted(len(online), 'online consumer')} ({named}); "
                f"stop {'it' if len(online) == 1 else 'them'} first",
                subject=subject,
                group=name,
                consumers=len(online),
            )
        return group

    def remove_group(self, group: Group) -> None:
        """Forget a group and its position."""
        for consumer in group.consumers.values():
            self._broker.sessions.pop(consumer.session, None)
            self._online.discard(consumer)
            self._leased.discard(consumer)
        self._broker.event(Action.FORGET_GROUP, group, 0, 0, 0, 0)
        self._broker.remove_group(group)
