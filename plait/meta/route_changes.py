"""The routes of subjects: views for clients, changes of the target, and the orders that make brokers follow a route.

Broker orders are idempotent and carry their route version, so several meta servers may send the same order at once,
late or twice (see ``plait/model/route.py``). The database records what each broker has carried out. Any meta server
computes the remaining orders from that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from plait.errors import MetaUnavailable
from plait.meta.brokers import Brokers
from plait.meta.core import Core, decided
from plait.meta.subjects import Subjects, check_count, check_groups, new_places, progress_of
from plait.model import route as routes
from plait.model.logical_partitions import NumberedRun, Run
from plait.model.route import PartitionId, Route
from plait.model.settings import SubjectSettings, subject_settings
from plait.wire.admin.cluster import State


class RouteView(msgspec.Struct, frozen=True):
    """What a client needs to send to a subject and to consume it."""

    route: Route
    settings: SubjectSettings
    #: Broker group → addresses and state.
    brokers: dict[str, tuple[list[str], State]]
    #: Group → (partition index, first, end, fence) of the LPs that it has finished there, as brokers reported.
    passed: dict[str, list[tuple[int, int, int, int]]] = {}
    #: Indexes of the partitions whose brokers have reported.
    reported: list[int] = []


class Make(NamedTuple):
    """Broker order: create the partition if it does not exist, and open it for these LPs."""

    subject: str
    version: int
    place: PartitionId
    lps: list[Run]
    settings: SubjectSettings


class Move(NamedTuple):
    """Broker order: seal these LPs of the partition, and reply with their fences."""

    subject: str
    version: int
    place: PartitionId
    lps: list[Run]


class Drop(NamedTuple):
    """Broker order: drop the partition with all its messages, because no route names it."""

    subject: str
    #: A partition that was created again later knows a higher version and stays.
    version: int
    place: PartitionId
    #: The number of the database change that removed it from the route.
    change: int


class RouteChanges:
    """The routes of all subjects, and the broker orders that follow from them."""

    def __init__(self, core: Core, brokers: Brokers, subjects: Subjects) -> None:
        self._core = core
        self._brokers = brokers
        self._subjects = subjects
        #: Subject → remaining orders, if it has any.
        self._pending: dict[str, tuple[list[Make], list[Move]]] = {}

    def view(self, subject: str, *, create: bool = True) -> RouteView:
        """The newest route. With ``create``, a subject that does not exist is created.

        While the database is down, this is the last known route. That is safe, because brokers refuse requests under an
        outdated route, and it lets new processes send and consume.
        """
        core = self._core
        core.refresh_if_up()
        if core.mirror.subject(subject) is None:
            if core.down is not None:
                # Another meta server may have created it meanwhile.
                raise MetaUnavailable(core.down.message, **core.down.details)
            if create:
                self._subjects.create(subject, may_exist=True)
        settings = subject_settings(self._subjects.row(subject).settings)
        route = self._core.mirror.route(subject)
        groups = sorted({place.group for place in route.partitions})
        brokers = {group: (self._brokers.addresses(group), self._brokers.state(group)) for group in groups}
        passed: dict[str, list[tuple[int, int, int, int]]] = {}
        reported = []
        for index, place in enumerate(route.partitions):
            progress = progress_of(self._core.mirror.partitions[place])
            if progress is not None:
                reported.append(index)
                for group, runs in progress.passed.items():
                    passed.setdefault(group, []).extend((index, *run) for run in runs)
        return RouteView(route, settings, brokers, passed, reported)

    @decided
    def retarget(self, subject: str, partitions: int | Sequence[PartitionId]) -> Route:
        """Set the target of the route: this number of partitions, or these partitions. Returns the new route."""
        self._subjects.row(subject)
        route = self._core.mirror.route(subject)
        places = self._places(route, partitions) if isinstance(partitions, int) else list(partitions)
        check_groups(self._core, places)
        return self._publish(route, routes.retarget(route, places))

    def _places(self, route: Route, count: int) -> list[PartitionId]:
        """``count`` target partitions: broker groups with the fewest get more, those with the most lose some."""
        check_count(count)
        places = [route.partitions[index] for index in sorted(set(routes.target(route).tolist()))]
        on = Counter(place.group for place in places)
        while len(places) > count:
            fullest = max(on, key=lambda group: (on[group], group))
            last = max((place for place in places if place.group == fullest), key=places.index)
            places.remove(last)
            on[fullest] -= 1
        if len(places) == count:
            return places
        fit = self._brokers.available()
        if not fit:
            self._brokers.refuse(f"more partitions of subject {route.subject!r}")
        chosen = []
        for _ in range(count - len(places)):
            chosen.append(min(fit, key=lambda group: (on[group], fit.index(group))))
            on[chosen[-1]] += 1
        # A partition that still drains can be used again.
        draining = [place for place in route.partitions if place not in places]
        for group in list(chosen):
            again = next((place for place in draining if place.group == group), None)
            if again is not None:
                draining.remove(again)
                chosen.remove(group)
                places.append(again)
        return places + new_places(route.subject, iter(chosen), self._core.mirror.is_taken)

    # --- orders to brokers ----------------------------------------------------------------------

    def makes(self, subject: str | None = None) -> list[Make]:
        """Orders to create or open partitions that their brokers have not carried out."""
        return [make for makes, _ in self._left(subject) for make in makes]

    def unmade(self, subject: str) -> list[Make]:
        """Those of ``makes`` whose partition is in use and does not exist yet: a new subject waits for them."""
        mirror = self._core.mirror
        makes = [make for make in self.makes(subject) if not mirror.partitions[make.place].told]
        if not makes:
            return []
        route = mirror.route(subject)
        here = {route.partitions[index] for index in set(routes.current(route).tolist())}
        return [make for make in makes if make.place in here]

    @decided
    def made(self, make: Make) -> None:
        """Record that the broker has durably carried out the order."""
        row = self._core.mirror.partitions.get(make.place)
        if row is None or row.subject != make.subject or row.state != "kept" or row.told >= make.version:
            return
        with self._core.change() as change:
            change.replace((row, msgspec.structs.replace(row, told=make.version)))

    def moves(self, subject: str | None = None) -> list[Move]:
        """Orders to seal LPs whose new partition exists."""
        return [move for _, moves in self._left(subject) for move in moves]

    @decided
    def sealed(self, move: Move, fences: Sequence[NumberedRun]) -> None:
        """Record that the broker has durably sealed LPs; ``fences`` has (first, end, fence) of each run."""
        if self._core.mirror.subject(move.subject) is None:
            return
        route = self._core.mirror.route(move.subject)
        if move.place in route.partitions:
            index = route.partitions.index(move.place)
            self._publish(route, routes.sealed(route, move.version, index, fences))

    def drops(self) -> list[Drop]:
        """Orders to drop partitions that no route names."""
        mirror = self._core.mirror
        rows = [(place, mirror.partitions[place]) for place in sorted(mirror.dropping)]
        return [Drop(row.subject, mirror.routes[row.subject].version, place, row.changed) for place, row in rows]

    @decided
    def dropped(self, drop: Drop) -> None:
        """Record that the broker has dropped the partition."""
        row = self._core.mirror.partitions.get(drop.place)
        # If the partition was created and removed again since, ``changed`` differs.
        if row is not None and row.state == "dropping" and row.changed == drop.change:
            with self._core.change() as change:
                change.replace((row, msgspec.structs.replace(row, state="gone")))

    def _publish(self, before: Route, after: Route) -> Route:
        if after is not before:
            with self._core.change() as change:
                self._subjects.publish(change, after)
        return after

    def _left(self, subject: str | None) -> list[tuple[list[Make], list[Move]]]:
        """The remaining orders. Recomputed only for subjects that changed."""
        mirror = self._core.mirror
        while mirror.unsettled:
            name = mirror.unsettled.pop()
            makes, moves = ([], []) if mirror.subject(name) is None else self._orders(mirror.route(name))
            if makes or moves:
                self._pending[name] = (makes, moves)
            else:
                self._pending.pop(name, None)
        if subject is None:
            return [self._pending[name] for name in sorted(self._pending)]
        return [self._pending[subject]] if subject in self._pending else []

    def _orders(self, route: Route) -> tuple[list[Make], list[Move]]:
        subject, version = route.subject, route.version
        settings = subject_settings(self._subjects.row(subject).settings)
        applied = [self._core.mirror.partitions[place].told for place in route.partitions]
        makes = [
            Make(subject, version, place, lps, settings)
            for place, known, gained, lps in zip(
                route.partitions, applied, route.gained, routes.openings(route), strict=True
            )
            if known < gained
        ]
        made = [index for index, known in enumerate(applied) if known]
        moves = [
            Move(subject, version, route.partitions[partition], lps) for partition, lps in routes.moves(route, made)
        ]
        return makes, moves
