"""Leases of ordered consumers: requests for locks, renewals, grants (R14-R16).

The consumer counts its lease from when it sends the request. The broker counts from when the request arrives, and adds
a margin, so the lease ends first at the consumer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import msgspec
import numpy as np

from plait.broker.granted_numbers import GrantedNumbers
from plait.broker.groups.group import AttachedConsumer, Group
from plait.broker.groups.ordered.locks import Epochs, Grant, Want
from plait.broker.groups.ordered.ordered_group import OrderedGroup
from plait.broker.groups.waking import end_pulls, wake_group
from plait.broker.partitions.partition import Partition
from plait.broker.turn import Turn
from plait.errors import InvalidArgument, StaleSession
from plait.frame.header import SEQUENCE_MAX
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import NO_KEY_HASH, LpSet, lp_set, runs_of, runs_with

#: Groups examined in one turn: one without locks to grant takes a microsecond or two.
LOOK_GROUPS: Final = 2_000


class LeaseGrant(NamedTuple):
    """The reply to a request for locks, valid for ``seconds`` from when the consumer sent the request."""

    seconds: float
    news: int
    owned: list[Grant]
    leaving: list[tuple[int, int]]
    drained: list[tuple[int, int]]
    refused: list[Grant]
    parked: list[int]
    inherited: list[int]
    again: list[tuple[int, int]]


class LeaseGrants(msgspec.Struct, eq=False):
    """The leases of a broker."""

    _turn: Turn
    _numbers: GrantedNumbers
    _sessions: Mapping[int, AttachedConsumer]
    #: The ordered groups, by their ids.
    _groups: dict[int, OrderedGroup] = {}

    @property
    def seconds(self) -> float:
        """The length of a lease for the consumer."""
        return self._turn.limits.lease_seconds

    @property
    def longest(self) -> float:
        """The length of a lease for the broker."""
        limits = self._turn.limits
        return limits.lease_seconds * (1 + limits.lease_margin)

    def now(self) -> float:
        return self._turn.clock.monotonic()

    def set_floors(self, floors: Mapping[tuple[str, str], Iterable[Grant]]) -> None:
        """Set the lowest epochs, which the meta server sent, and start to grant locks."""
        for grants in floors.values():
            for _, _, epoch in grants:
                self._numbers.learn(epoch)
        self._turn.floors.raise_to(floors)
        self.look()

    def ask(
        self,
        consumer: AttachedConsumer,
        wants: Iterable[Want],
        marks: list[int],
        resumed: list[int],
        route: int,
    ) -> LeaseGrant:
        """Replace the locks that a consumer wants and renew its lease; returns the locks that it has.

        ``marks`` and ``resumed``: hashes of keys that are parked, or were resumed, in other partitions. ``route``: the
        version of the consumer's route. A request with an invalid number is refused before it changes anything.
        """
        group = self._ordered(consumer)
        wanted = self._checked(wants)
        chosen = lp_set((first, end) for first, end, _, _ in wanted)
        marks = self._checked_keys(marks, chosen, "parked")
        resumed = self._checked_keys(resumed, chosen, "resumed")
        group.policy.refuse_more_keys(marks)
        if route < group.partition.row.route and not group.definition.affinity:
            wanted = _limit_to_route(wanted, _known_until(group.partition, route))
        consumer.leased_until = self.now() + self.longest
        group.handover.lease(consumer, wanted, self.now())
        group.policy.inherit(marks, resumed)
        wake_group(group)
        owned, leaving, refused = group.locks.state(consumer.id)
        drained, again = runs_of(group.handover.drained(wanted)), runs_of(group.handover.sealed_unfinished())
        parked, inherited = _parked(group, chosen)
        return LeaseGrant(self.seconds, consumer.news, owned, leaving, drained, refused, parked, inherited, again)

    def _checked(self, wants: Iterable[Want]) -> list[Want]:
        """The wanted locks as a list; ``InvalidArgument`` if a run, epoch or sequence is not valid."""
        wanted = list(wants)
        if len(wanted) > LOGICAL_PARTITIONS:
            raise InvalidArgument(
                f"{len(wanted)} runs are more than the {LOGICAL_PARTITIONS} logical partitions; "
                "name each logical partition at most once"
            )
        for first, end, epoch, until in wanted:
            if not (0 <= first < end <= LOGICAL_PARTITIONS and epoch > 0 and 0 <= until < SEQUENCE_MAX):
                raise InvalidArgument(
                    f"[{first}, {end}) under epoch {epoch} up to {until} is not a run of logical partitions; use 0 "
                    f"<= first < end <= {LOGICAL_PARTITIONS}, an epoch above 0 and a valid sequence"
                )
            self._numbers.check("epoch", epoch)
        return wanted

    def _checked_keys(self, keys: list[int], lps: LpSet, what: str) -> list[int]:
        """The key hashes that belong to the requested logical partitions."""
        limit = self._turn.limits.held_keys
        if len(keys) > limit:
            raise InvalidArgument(
                f"{len(keys)} {what} keys are above the limit of {limit} per group (limit `held_keys`); send fewer"
            )
        try:
            hashes = np.array(keys, np.uint64)
        except OverflowError:
            wrong = next(key for key in keys if not 0 <= key < 1 << 64)
            raise InvalidArgument(f"{wrong} is not a key hash; use an unsigned 64-bit number") from None
        return hashes[lps[hashes % LOGICAL_PARTITIONS] & (hashes != NO_KEY_HASH)].tolist()  # type: ignore[no-any-return]

    def give_back(
        self,
        consumer: AttachedConsumer,
        runs: list[tuple[int, int]],
        ranges: list[tuple[int, int, int]],
        tags: list[int],
    ) -> None:
        """Put back rows that the consumer has not begun: those of the LPs in ``runs`` that lie in ``ranges``.

        ``ranges`` are (start, end, epoch); ``tags`` has the number of the delivery of each range.
        """
        if len(runs) > LOGICAL_PARTITIONS or not all(0 <= first < end <= LOGICAL_PARTITIONS for first, end in runs):
            raise InvalidArgument(
                f"not all of the {len(runs)} runs, which start with {runs[:10]}, are runs of logical partitions; use 0 "
                f"<= first < end <= {LOGICAL_PARTITIONS} and name each logical partition once"
            )
        self._ordered(consumer).give_back(consumer, lp_set(runs), ranges, tags)

    def _ordered(self, consumer: AttachedConsumer) -> OrderedGroup:
        group = consumer.group
        if not isinstance(group, OrderedGroup):
            raise InvalidArgument(f"group {group.name!r} is not ordered and has no locks; attach with ordered=True")
        self._turn.refuse_when_stalled()
        return group

    def renew(self, sessions: Iterable[tuple[int, int]]) -> None:
        """Renew the leases of (session, token) pairs; ``StaleSession`` if a session has ended."""
        now = self.now()
        for session, token in sessions:
            consumer = self._sessions.get(session)
            if consumer is None or not consumer.proved_by(token):
                raise StaleSession("this session has ended: the consumer was lost or attached elsewhere; attach again")
            consumer.leased_until = now + self.longest
            consumer.last_contact = now

    def add(self, group: Group) -> None:
        """Add a group, if it is ordered."""
        if isinstance(group, OrderedGroup):
            self._groups[group.id] = group

    def remove(self, group: Group) -> None:
        """Remove a group."""
        self._groups.pop(group.id, None)

    def look(self) -> None:
        """``look_steps`` in one step."""
        for _ in self.look_steps():
            pass

    def look_steps(self) -> Iterator[None]:
        """Grant locks that could not be granted before, in steps of one loop turn. Call it every second."""
        for number, group in enumerate(list(self._groups.values()), 1):
            if group.consumers and group.id in self._groups:
                try:
                    group.handover.transfer(self.now())
                except Exception:  # noqa: BLE001 (end_pulls logs it)
                    end_pulls(group)
            if number % LOOK_GROUPS == 0:
                yield


def _parked(group: OrderedGroup, lps: LpSet) -> tuple[list[int], list[int]]:
    """The parked keys of these LPs, and those of them that are parked only because an earlier partition parked them."""
    parked = group.policy.parked()
    if not parked:
        return [], []
    among = lps.tolist()
    found = [
        (each.key, each.letter < 0) for each in parked if each.key is not None and among[each.key % LOGICAL_PARTITIONS]
    ]
    return [key for key, _ in found], [key for key, only in found if only]


def _known_until(partition: Partition, route: int) -> Epochs:
    """For each LP, the first sequence that a route of this version does not cover; -1: it covers all."""
    begins = np.full(LOGICAL_PARTITIONS, -1, np.int64)
    # The lowest sequence is written last and wins.
    for first, end, sequence, version in sorted(partition.row.reopened, key=lambda each: -each[2]):
        if version > route:
            begins[first:end] = sequence
    return begins


def _limit_to_route(wants: list[Want], known_until: Epochs) -> list[Want]:
    """Limit the wanted rows of a consumer with an older route to the rows that its route covers (R4).

    Rows that arrived after an LP moved to another partition and back are not covered.
    """
    known: list[Want] = []
    for first, end, epoch, until in wants:
        if until:
            known.append((first, end, epoch, until))
            continue
        for low, high, begins in runs_with(known_until, lp_set([(first, end)])):
            if begins:
                known.append((low, high, epoch, max(begins, 0)))
    return known
