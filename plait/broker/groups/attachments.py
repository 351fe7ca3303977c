"""The consumers and groups of a broker: attaching, detaching, losing and forgetting them.

A consumer that sends nothing for ``consumer_lost_seconds`` is lost, and the group delivers its rows to other consumers
at once. It may attach again under the same client id, and then names the rows that it still holds (R13).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from plait.broker.broker import Broker
from plait.broker.groups import rewinding
from plait.broker.groups.group import AFTER_CLIENT, AttachedConsumer, Group, proof_of
from plait.broker.groups.group_settings import (
    NO_FILTER,
    GroupFilter,
    change_retry,
    group_for,
    set_fair_by,
    set_retry,
)
from plait.broker.groups.ordered.ordered_group import OrderedGroup
from plait.broker.groups.waking import end_pulls, wake_group
from plait.broker.partitions.partition import Partition
from plait.errors import GroupBusy, GroupNotFound, LimitExceeded
from plait.model import names
from plait.model.retry_policy import Retry
from plait.storage.logs.action_events import ForgotConsumer, ForgotGroup
from plait.storage.logs.action_log import ConsumerDefinition, GroupDefinition
from plait.wire.admin.rewinds import PartitionRewind
from plait.wire.admin.subjects import SetGroup

log = logging.getLogger("plait.broker")

Delivery = Literal["at_least_once", "at_most_once"]

#: Partitions whose consumers and groups one turn examines, to forget those that are idle.
STEP_PARTITIONS = 1_000


class Attachments:
    """The consumers of a broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        # The time until a consumer without contact is lost begins again when the broker restarts.
        now = broker.clock.monotonic()
        self._last_session = 0
        self._online: set[AttachedConsumer] = set()
        #: Online consumers of ordered groups, which are lost when their leases end.
        self._leased: set[AttachedConsumer] = set()
        for partition in broker.partitions.values():
            for group in partition.groups.values():
                for consumer in group.consumers.values():
                    consumer.last_contact = now
                    consumer.leased_until = now + broker.leases.longest
                    if group.holds(consumer.id):
                        consumer.online = True
                        self._set_online(consumer)

    def _set_online(self, consumer: AttachedConsumer) -> None:
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
        wanted: GroupFilter = NO_FILTER,
        fair_by: str | None = None,
    ) -> AttachedConsumer:
        """Attach ``client`` to the group, in a new session. Without a group name the group is a broadcast.

        ``holds``: rows that the client still holds. Ignored unless their partition ``holds_of`` is this one (0: it is).
        ``retry``: None leaves the group's policy unchanged.
        ``affinity``: an ordered group in which a failed row holds back nothing.
        ``token``: the secret of an ordered member. Without it the client cannot continue an earlier session of the same
        client id.
        ``began``: the version of the route at which the group began. A partition that accepted its first rows later is
        read from its first row, whatever ``start`` is.
        ``wanted``: the filter that the member states, or the newest one that it knows.
        ``fair_by``: what identifies a tenant of a fair group.
        """
        broker = self._broker
        broker.turn.refuse_when_stalled()
        partition = broker.partition_of(subject)
        name, created = names.of_group(group_name, client), broker.clock.now()
        broadcast = group_name is None
        asked = GroupDefinition(0, partition.id, name, 0, broadcast, delivery, created, retry, ordered, affinity, began)
        asked = asked if fair_by is None else msgspec.structs.replace(asked, fair_by=fair_by)
        group = group_for(broker, partition, asked, start, wanted)
        now = broker.clock.monotonic()
        consumer = self._consumer(group, client, token, now)
        if retry is not None and retry != group.retry:
            change_retry(broker, group, client, retry)
        self._drop_waiters(group, consumer)
        group.reclaim(consumer, holds or [] if holds_of in (0, partition.id) else [], broker.clock.now())
        consumer.online = consumer.connected = True
        consumer.leased_until = max(consumer.leased_until, now + broker.leases.longest)
        self._set_online(consumer)
        consumer.last_contact = now
        group.used = broker.clock.now()
        broker.sessions.pop(consumer.session, None)
        self._last_session += 1
        consumer.session = self._last_session
        broker.sessions[consumer.session] = consumer
        wake_group(group)
        return consumer

    def _consumer(self, group: Group, client: str, token: int, now: float) -> AttachedConsumer:
        """The known consumer of a client id, or a new one; ``GroupBusy`` while another process has the client id."""
        limits = self._broker.limits
        consumer = group.consumers.get(client)
        if consumer is not None and not consumer.proved_by(token):
            if consumer.connected and now - consumer.last_contact < limits.consumer_lost_seconds:
                subject = group.partition.row.subject
                raise GroupBusy(
                    f"client {client!r} is already attached to group {group.name!r} of {subject!r}; "
                    "use a different client id in each process",
                    subject=subject,
                    group=group.name,
                    client=client,
                )
            consumer = self._displace(consumer, now)
        proof = proof_of(token)
        if consumer is None:
            if len(self._online) >= limits.consumers:
                raise LimitExceeded(
                    f"consumer limit reached ({limits.consumers} per broker, limit `consumers`); "
                    "close idle consumers or raise it",
                    limit="consumers",
                    value=limits.consumers,
                )
            consumer = AttachedConsumer(self._broker.catalog.next_consumer, group, client, now)
            self._broker.catalog.next_consumer += 1
            self._define(consumer, client, proof)
        elif proof != consumer.proof:
            self._define(consumer, client, proof)
        return consumer

    def _displace(self, consumer: AttachedConsumer, now: float) -> AttachedConsumer | None:
        """Free the client id of a known consumer for a client that does not have its session token.

        Returns the known consumer if the client may become it, or None if the client needs a new one. The known one may
        still handle the LPs that it has locked, until its lease ends (R28). So it keeps the locks under another client
        id, and the new consumer waits for them.
        """
        group = consumer.group
        if not isinstance(group, OrderedGroup) or not group.locks.had_by(consumer.id):
            return consumer
        if consumer.leased_until <= now:
            self._lose(consumer)
            return None
        self._drop_waiters(group, consumer)
        self._broker.sessions.pop(consumer.session, None)
        consumer.connected = False
        self._define(consumer, f"{consumer.client}{AFTER_CLIENT}{consumer.id}", consumer.proof)
        return None

    def _define(self, consumer: AttachedConsumer, client: str, proof: int) -> None:
        """Record the consumer's client id and the proof of its token."""
        consumer.group.redefine_consumer(consumer, client, proof)
        self._broker.turn.define(ConsumerDefinition(consumer.id, consumer.group.id, client, proof))
        self._broker.turn.touch(consumer.group.partition)

    def detach(self, consumer: AttachedConsumer) -> None:
        """Detach a consumer that leaves: the rows that it holds return to the group at once."""
        group = consumer.group
        self._end_session(consumer)
        group.offline(consumer, self._broker.clock.now())
        self._forget(consumer)
        wake_group(group)

    def _forget(self, consumer: AttachedConsumer) -> None:
        """Remove a consumer that holds nothing, to keep it out of later segment headers of the action log."""
        consumer.group.remove(consumer)
        self._broker.turn.event(consumer.group, ForgotConsumer(consumer.id))

    def disconnected(self, consumer: AttachedConsumer, session: int) -> None:
        """Record that the connection closed; the consumer has ``consumer_lost_seconds`` to attach again."""
        if consumer.session == session:
            self._drop_waiters(consumer.group, consumer)
            consumer.connected = False
            self._broker.sessions.pop(session, None)

    def end_pulls(self, consumer: AttachedConsumer) -> None:
        """Answer the consumer's suspended pulls with no rows."""
        for waiter in [waiter for waiter in consumer.group.waiters if waiter.consumer is consumer]:
            waiter.time_out()

    def _drop_waiters(self, group: Group, consumer: AttachedConsumer) -> None:
        for waiter in [waiter for waiter in group.waiters if waiter.consumer is consumer]:
            waiter.leave()

    def lose_silent(self) -> list[tuple[AttachedConsumer, int]]:
        """Lose consumers without contact. Returns each with its number of returned messages. Call it every second."""
        broker = self._broker
        now = broker.clock.monotonic()
        deadline = now - broker.limits.consumer_lost_seconds
        # A consumer of an ordered group may rely on its locks until its lease ends, whether it makes contact or not.
        silent = [
            consumer for consumer in self._online if consumer.last_contact < deadline and consumer not in self._leased
        ]
        silent += [consumer for consumer in self._leased if consumer.leased_until <= now]
        silent.sort(key=lambda consumer: consumer.id)
        lost = []
        for consumer in silent:
            try:
                lost.append((consumer, self._lose(consumer)))
            except Exception:  # noqa: BLE001 (end_pulls logs it)
                end_pulls(consumer.group)
        return lost

    @property
    def next_lease_end(self) -> float | None:
        """When the first lease ends, on the monotonic clock."""
        return min((consumer.leased_until for consumer in self._leased), default=None)

    def _end_session(self, consumer: AttachedConsumer) -> None:
        self._drop_waiters(consumer.group, consumer)
        self._broker.sessions.pop(consumer.session, None)
        self._online.discard(consumer)
        self._leased.discard(consumer)
        consumer.connected = False

    def _lose(self, consumer: AttachedConsumer) -> int:
        group = consumer.group
        self._end_session(consumer)
        before = group.died_count
        returned = group.lost(consumer, self._broker.clock.now())
        if group.died_count > before:
            log.warning(
                "%d messages of %s went to the dead letters of group %s: consumer %s was lost at their last attempt",
                group.died_count - before,
                group.partition.row.name,
                group.name,
                consumer.client,
            )
        self._forget(consumer)
        wake_group(group)
        return returned

    def forget_idle_steps(self) -> Iterator[int]:
        """Forget consumers that did not attach again after a restart, and unused broadcast groups.

        Each step takes one loop turn and yields how many it forgot.
        """
        partitions = list(self._broker.partitions.values())
        for start in range(0, len(partitions), STEP_PARTITIONS):
            yield sum(map(self._forget_idle, partitions[start : start + STEP_PARTITIONS]))

    def _forget_idle(self, partition: Partition) -> int:
        broker = self._broker
        if broker.turn.failed is not None or broker.partitions.get(partition.id) is not partition:
            return 0
        limit = broker.limits.group_forget_seconds
        now, wall = broker.clock.monotonic(), broker.clock.now()
        deadline = now - broker.limits.consumer_lost_seconds
        idle: list[Group] = []
        gone: list[AttachedConsumer] = []
        for group in partition.groups.values():
            gone += [each for each in group.consumers.values() if not each.online and each.last_contact < deadline]
            if group.definition.broadcast and not group.paused and (wall - group.used) / 1_000_000 > limit:
                idle.append(group)
        for consumer in gone:
            self._forget(consumer)
        unused = [group for group in idle if not group.consumers]
        for group in unused:
            self.remove_group(group)
        return len(gone) + len(unused)

    # --- administration -------------------------------------------------------------------------

    def group(self, subject: str, name: str) -> Group:
        """The group; ``GroupNotFound`` if the subject has none of this name."""
        partition = self._broker.partition_of(subject, create=False)
        group = partition.groups.get(name)
        if group is None:
            known = ", ".join(sorted(partition.groups)[:10]) or "none"
            raise GroupNotFound(
                f"subject {subject!r} has no group {name!r}; it has: {known}", subject=subject, group=name
            )
        return group

    def rewind(self, subject: str, name: str, start: Any, **settings: bool) -> PartitionRewind:
        """Rewind a group without connected consumers (``rewinding.rewind``)."""
        return rewinding.rewind(self._broker, self._idle(subject, name), start, **settings)

    def set_group(self, subject: str, name: str, request: SetGroup) -> Group:
        """Change settings of a group without connected consumers, as all members must have the same."""
        group = self._idle(subject, name)
        if request.retry is not None and request.retry != group.retry:
            set_retry(self._broker, group, request.retry)
        if not isinstance(request.fair_by, msgspec.UnsetType):
            set_fair_by(self._broker, group, request.fair_by)
        return group

    def delete(self, subject: str, name: str) -> None:
        """Delete a group without connected consumers, its position and its dead letters."""
        self._broker.turn.refuse_when_stalled()
        self.remove_group(self._idle(subject, name))
        self._broker.catalog.retention_wanted = True

    def _idle(self, subject: str, name: str) -> Group:
        """The group; ``GroupBusy`` while a consumer is connected."""
        group = self.group(subject, name)
        online = [consumer.client for consumer in group.consumers.values() if consumer.connected]
        if online:
            named = ", ".join(online[:3])
            raise GroupBusy(
                f"group {name!r} of {subject!r} has {names.counted(len(online), 'connected consumer')} ({named}); "
                f"stop {'it' if len(online) == 1 else 'them'} first",
                subject=subject,
                group=name,
                consumers=len(online),
            )
        return group

    def remove_group(self, group: Group) -> None:
        """Remove a group, its position and its consumers."""
        for consumer in group.consumers.values():
            self._broker.sessions.pop(consumer.session, None)
            self._online.discard(consumer)
            self._leased.discard(consumer)
        self._broker.turn.event(group, ForgotGroup())
        self._broker.catalog.remove_group(group)
