"""Leases of ordered consumers: asking for locks, renewing, and what follows when a lease is over (R14-R16).

A lease counts from when its request came, and a little longer than the consumer is told, whose own counts from when it
asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from plait.broker.groups.locks import Epochs, Grant, Want, epochs_of
from plait.broker.groups.ordered_group import OrderedGroup
from plait.broker.session_token import proves
from plait.errors import InvalidArgument, StaleSession
from plait.frame.header import SEQUENCE_MAX
from plait.limits import LOGICAL_PARTITIONS
from plait.model.logical_partitions import NO_KEY_HASH, LpSet, lp_set, runs_of, runs_with
from plait.model.lp_numbers import ZEROS, LpNumbers

if TYPE_CHECKING:
    from plait.broker.broker import Broker
    from plait.broker.groups.shared_group import AttachedConsumer, Group


#: Groups that are looked at in one turn: a look at one that waits for nothing takes a microsecond or two.
LOOK_GROUPS: Final = 2_000


class LeaseGrant(NamedTuple):
    """What a consumer has, for ``seconds`` from when it asked."""

    seconds: float
    news: int
    owned: list[Grant]
    leaving: list[tuple[int, int]]
    drained: list[tuple[int, int]]
    refused: list[Grant]
    parked: list[int]
    inherited: list[int]
    again: list[tuple[int, int]]


class LeaseGrants:
    """The leases of a broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        #: Nothing is granted before the meta server has said which epochs there were (R15).
        self.waits_for_floors = False
        #: (subject, group) → locks are granted under these epochs or higher ones.
        self._floors: dict[tuple[str, str], LpNumbers] = {}
        #: The ordered groups, by their ids.
        self._groups: dict[int, OrderedGroup] = {}

    @property
    def seconds(self) -> float:
        """What a consumer is told."""
        return self._broker.limits.lease_seconds

    @property
    def longest(self) -> float:
        """What the broker waits for."""
        limits = self._broker.limits
        return limits.lease_seconds * (1 + limits.lease_margin)

    def now(self) -> float:
        return self._broker.clock.monotonic()

    def floor(self, group: Group) -> LpNumbers | None:
        """Locks are granted under these epochs or higher ones; None: not at all at present."""
        if self.waits_for_floors:
            return None
        return self._floors.get((group.partition.row.subject, group.name), ZEROS)

    def set_floors(self, floors: Mapping[tuple[str, str], Iterable[Grant]]) -> None:
        """What the meta server says; from now on locks are granted."""
        for group, grants in floors.items():
            for _, _, epoch in grants:
                self._broker.numbers.learn(epoch)
            epochs = epochs_of(each for each in grants if each[2] > 0)
            self._floors[group] = LpNumbers.of(np.maximum(self._floors.get(group, ZEROS).array(), epochs))
        self.waits_for_floors = False
        self.look()

    def ask(
        self,
        consumer: AttachedConsumer,
        wants: Iterable[Want],
        marks: list[int],
        resumed: list[int],
        route: int,
    ) -> LeaseGrant:
        """All the locks that a consumer wants from now on; what it has of them, for another lease.

        ``route`` is the version of the route that it goes by. A request with a number that cannot be is refused before
        it changes anything.
        """
        group = self._ordered(consumer)
        wanted = self._checked(wants)
        chosen = lp_set((first, end) for first, end, _, _ in wanted)
        marks, resumed = self._checked_keys(marks, chosen), self._checked_keys(resumed, chosen)
        group.refuse_more_keys(marks)
        if route < group.partition.row.route and not group.definition.affinity:
            wanted = _as_far_as_known(wanted, group.partition.known_until(route))
        consumer.leased_until = self.now() + self.longest
        group.lease(consumer, wanted, self._broker, self.now())
        group.inherit(marks, resumed, self._broker)
        self._broker.wake_group(group)
        owned, leaving, refused = group.standing(consumer)
        drained, again = runs_of(group.drained(wanted)), runs_of(group.again())
        parked, inherited = _parked(group, chosen)
        return LeaseGrant(self.seconds, consumer.news, owned, leaving, drained, refused, parked, inherited, again)

    def _checked(self, wants: Iterable[Want]) -> list[Want]:
        """What is wanted, of runs, epochs and sequences that can be."""
        wanted = list(wants)
        if len(wanted) > LOGICAL_PARTITIONS:
            raise InvalidArgument(
                f"{len(wanted)} runs of logical partitions are more than there are logical partitions; "
                f"ask for at most {LOGICAL_PARTITIONS}, each once"
            )
        for first, end, epoch, until in wanted:
            if not (0 <= first < end <= LOGICAL_PARTITIONS and epoch > 0 and 0 <= until < SEQUENCE_MAX):
                raise InvalidArgument(
                    f"[{first}, {end}) under epoch {epoch} up to {until} is not a run of logical partitions"
                )
            self._broker.numbers.check("epoch", epoch)
        return wanted

    def _checked_keys(self, keys: list[int], lps: LpSet) -> list[int]:
        """Those of the keys, named by their hashes, that are of the logical partitions that are asked for."""
        limit = self._broker.limits.held_keys
        if len(keys) > limit:
            raise InvalidArgument(
                f"{len(keys)} parked keys are more than the {limit} of a group (limit held_keys); resume or skip some"
            )
        try:
            hashes = np.array(keys, np.uint64)
        except OverflowError:
            wrong = next(key for key in keys if not 0 <= key < 1 << 64)
            raise InvalidArgument(f"{wrong} is not the hash of a key; use 64 bits without a sign") from None
        return hashes[lps[hashes % LOGICAL_PARTITIONS] & (hashes != NO_KEY_HASH)].tolist()  # type: ignore[no-any-return]

    def give_back(
        self,
        consumer: AttachedConsumer,
        runs: list[tuple[int, int]],
        ranges: list[tuple[int, int, int]],
        tags: list[int],
    ) -> None:
        """A consumer has not begun with the rows of some logical partitions in (start, end, epoch) ranges."""
        if len(runs) > LOGICAL_PARTITIONS or not all(0 <= first < end <= LOGICAL_PARTITIONS for first, end in runs):
            raise InvalidArgument(f"{runs[:10]} (of {len(runs)}) are not runs of logical partitions, each named once")
        self._ordered(consumer).give_back(consumer, lp_set(runs), ranges, tags, self._broker)

    def _ordered(self, consumer: AttachedConsumer) -> OrderedGroup:
        group = consumer.group
        if not isinstance(group, OrderedGroup):
            raise InvalidArgument(f"group {group.name!r} is not an ordered one; it has no locks")
        self._broker.refuse_when_stalled()
        return group

    def renew(self, sessions: Iterable[tuple[int, int]]) -> None:
        """What these (session, token) have goes on for another lease; ``StaleSession`` if one is over."""
        now = self.now()
        for session, token in sessions:
            consumer = self._broker.sessions.get(session)
            if consumer is None or not proves(token, consumer.proof):
                raise StaleSession("this consumer was given up; attach again")
            consumer.leased_until = now + self.longest
            consumer.heard = now

    def news(self, group: Group, number: int) -> None:
        """There is something new about a consumer's locks: what it waits for is answered, and it asks."""
        for consumer in group.consumers.values():
            if consumer.id == number:
                consumer.news += 1
                for waiter in [each for each in group.waiters if each.consumer is consumer]:
                    waiter.time_out()

    def add(self, group: Group) -> None:
        """A group is known."""
        if isinstance(group, OrderedGroup):
            self._groups[group.id] = group

    def remove(self, group: Group) -> None:
        """A group is gone."""
        self._groups.pop(group.id, None)

    def look(self) -> None:
        """The same as ``look_steps``, at once."""
        for _ in self.look_steps():
            pass

    def look_steps(self) -> Iterator[None]:
        """Grant what could not be granted before, in steps of one loop turn each. Call it every second."""
        for number, group in enumerate(list(self._groups.values()), 1):
            if group.consumers and group.id in self._groups:
                try:
                    group.pass_on(self._broker, self.now())
                except Exception:  # noqa: BLE001 (it is logged there)
                    self._broker.waking.failed(group)
            if number % LOOK_GROUPS == 0:
                yield


def _parked(group: OrderedGroup, lps: LpSet) -> tuple[list[int], list[int]]:
    """The parked keys of what is wanted, and those of them that are so only because they were told to be."""
    parked = group.parked()
    if not parked:
        return [], []
    among = lps.tolist()
    found = [
        (each.key, each.letter < 0) for each in parked if each.key is not None and among[each.key % LOGICAL_PARTITIONS]
    ]
    return [key for key, _ in found], [key for key, only in found if only]


def _as_far_as_known(wants: list[Want], known_until: Epochs) -> list[Want]:
    """What is wanted by who goes by an older route: not what came after the route led elsewhere and back (R4)."""
    known: list[Want] = []
    for first, end, epoch, until in wants:
        if until:
            known.append((first, end, epoch, until))
            continue
        for low, high, begins in runs_with(known_until, lp_set([(first, end)])):
            if begins:
                known.append((low, high, epoch, max(begins, 0)))
    return known
