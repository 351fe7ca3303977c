"""Subjects: created with a route over available broker groups, changed, deleted, and adopted from brokers."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice, takewhile
from typing import Any

import msgspec

from plait.errors import InvalidArgument, LimitExceeded, NoBroker, SubjectExists, SubjectNotFound
from plait.limits import LOGICAL_PARTITIONS, REMEMBERED_GROUPS_MAX, RESERVED, SUBSCRIBED_SUBJECTS_MAX
from plait.meta.brokers import Brokers
from plait.meta.core import Core, decided
from plait.meta.database.schema import PartitionAssignment, RouteRow, SubjectRow
from plait.meta.database.store import StoreChange
from plait.meta.route_rebuild import check, missing, rebuilt
from plait.model import names
from plait.model.logical_partitions import NumberedRun
from plait.model.rate import Rate
from plait.model.route import PartitionId, Route, announced, check_places, default_route
from plait.model.settings import SubjectSettings, subject_settings, text_of, with_pause, with_rate
from plait.model.subject_patterns import SubjectPatterns
from plait.wire.admin.cluster import RegisteredPartition
from plait.wire.admin.subjects import MatchedSubjects

log = logging.getLogger("plait.meta")

#: Broker groups of a new subject, unless the request says otherwise.
DEFAULT_GROUPS = 2
#: Subjects adopted in one transaction.
ADOPTED_AT_ONCE = 1_000


class ReportedProgress(msgspec.Struct, frozen=True, array_like=True):
    """The last report of a broker about a partition, as stored in the database."""

    #: Group → (first, end, fence) of the sealed LPs that the group has finished.
    passed: dict[str, list[NumberedRun]] = {}
    #: Rows below this sequence are removed; 0: the partition is sealed and never had a row; -1: no row is removed.
    gone_below: int = -1
    #: Group → the route version at which the group started.
    began: dict[str, int] = {}


_decoder = msgspec.msgpack.Decoder(ReportedProgress)


def progress_of(row: PartitionAssignment) -> ReportedProgress | None:
    """The last report about a partition, or None before the first."""
    return _decoder.decode(row.progress) if row.progress else None


class Subjects:
    """The subjects of the cluster."""

    def __init__(self, core: Core, brokers: Brokers) -> None:
        self._core = core
        self._brokers = brokers
        #: Partitions that brokers reported for unknown subjects, until they cover all LPs.
        self._found: dict[str, dict[PartitionId, RegisteredPartition]] = {}

    @decided
    def create(
        self,
        name: str,
        settings: SubjectSettings | None = None,
        *,
        partitions: int | Sequence[PartitionId] | None = None,
        groups: Sequence[str] | None = None,
        may_exist: bool = False,
    ) -> None:
        """Create a subject on ``groups`` (default: any), with a number of partitions or these partitions.

        Without ``partitions`` it gets one partition on each of ``groups``, or on two available broker groups. Raises
        ``SubjectExists``, or ``NoBroker`` if no broker group is available.
        """
        names.check("subject", name)
        if self._core.mirror.subject(name) is None:
            if may_exist:
                self._refuse_found(name)
            self._create(name, settings or SubjectSettings(), self._places(name, partitions, groups))
        elif not may_exist:
            raise SubjectExists(f"subject {name!r} exists already", subject=name)

    def _refuse_found(self, name: str) -> None:
        """Refuse to create a subject on first use if part of its lost route was found."""
        found = self._found.get(name)
        if found:
            lost, groups = missing(found), ", ".join(sorted({place.group for place in found}))
            raise NoBroker(
                f"the route of subject {name!r} was lost, and its partitions on broker group {groups} take "
                f"{LOGICAL_PARTITIONS - lost} of {LOGICAL_PARTITIONS} logical partitions; start the brokers that have "
                f"the others, or discard them with 'plait subject create {name}'"
            )

    def _places(
        self, subject: str, partitions: int | Sequence[PartitionId] | None, groups: Sequence[str] | None
    ) -> list[PartitionId]:
        if partitions is not None and not isinstance(partitions, int):
            check_groups(self._core, partitions)
            return list(partitions)
        fit = self._brokers.available(groups)
        if not fit:
            self._brokers.refuse(f"subject {subject!r}", groups)
        count = (len(fit) if groups else min(DEFAULT_GROUPS, len(fit))) if partitions is None else partitions
        check_count(count)
        return new_places(subject, islice(cycle(fit), count), self._core.mirror.is_taken)

    def _create(self, name: str, settings: SubjectSettings, places: Sequence[PartitionId]) -> None:
        mirror, limit = self._core.mirror, self._core.limits.subjects
        if len(mirror.subjects) >= limit:
            raise LimitExceeded(
                f"subject limit reached ({limit} per cluster, limit `subjects`); delete unused subjects or raise it",
                limit="subjects",
                value=limit,
            )
        check_places(places)
        row, before = SubjectRow(name, text_of(settings), self._core.clock.now()), mirror.subjects.get(name)
        with self._core.change() as change:
            if before is None:
                change.insert(row)
            else:
                change.replace((before, row))
            # Higher than every version of an earlier subject of this name.
            self.publish(change, default_route(name, places, change.number))

    def publish(self, change: StoreChange, route: Route) -> None:
        """Write a route, add its new partitions, and mark the partitions that it no longer names for dropping.

        The route remembers the groups of the partitions that are dropped.
        """
        mirror = self._core.mirror
        known, listed = mirror.partitions_of.get(route.subject, set()), set(route.partitions)
        leaving = [mirror.partitions[place] for place in sorted(known) if place not in listed]
        row = _stored(remembering(route, leaving))
        before = mirror.routes.get(route.subject)
        if before is None:
            change.insert(row)
        else:
            change.replace((before, row))
        self._define(change, route.subject, [place for place in route.partitions if place not in known])
        give_up(change, leaving)

    def _define(self, change: StoreChange, subject: str, places: Sequence[PartitionId]) -> None:
        known = self._core.mirror.partitions
        new = {place: PartitionAssignment(place.group, place.name, subject) for place in places}
        for place in places:
            before = known.get(place)
            if before is not None and before.state != "gone":
                dropping = " and is being dropped" if before.state == "dropping" else ""
                raise InvalidArgument(
                    f"partition {place} belongs to subject {before.subject!r}{dropping}; use another name"
                )
        change.replace(*((known[place], row) for place, row in new.items() if place in known))
        change.insert(*(row for place, row in new.items() if place not in known))

    @decided
    def update(self, name: str, settings: dict[str, Any]) -> None:
        """Change the named settings. Brokers get them with the next route version."""
        row = self.row(name)
        self._set(row, msgspec.structs.replace(subject_settings(row.settings), **settings))

    @decided
    def pause(self, name: str, group: str, *, paused: bool) -> int | None:
        """Pause or resume a group. Returns since when it is, or was, paused; None: it was not."""
        row = self.row(name)
        settings = subject_settings(row.settings)
        changed = with_pause(settings, group, self._core.clock.now() if paused else 0)
        self._set(row, changed)
        return changed.paused.get(group, settings.paused.get(group))

    @decided
    def set_rate(self, name: str, group: str | None, rate: Rate | None) -> None:
        """Set the limit of a group, or of sends."""
        row = self.row(name)
        self._set(row, with_rate(subject_settings(row.settings), group, rate))

    def _set(self, row: SubjectRow, settings: SubjectSettings) -> None:
        name, text = row.name, text_of(settings)
        if row.settings == text:
            return
        with self._core.change() as change:
            change.replace((row, msgspec.structs.replace(row, settings=text)))
            self.publish(change, announced(self._core.mirror.route(name)))

    @decided
    def delete(self, name: str) -> None:
        """Delete a subject with its groups. Its partitions are dropped by broker orders."""
        row, mirror = self.row(name), self._core.mirror
        groups = [mirror.groups[name, group] for group in sorted(mirror.groups_of.get(name, ()))]
        members = [member for group in groups for member in mirror.members.get((name, group.name), {}).values()]
        with self._core.change() as change:
            change.replace((row, msgspec.structs.replace(row, deleted=True)))
            give_up(change, [mirror.partitions[place] for place in sorted(mirror.partitions_of.get(name, ()))])
            living = [group for group in groups if not group.deleted]
            change.replace(*((group, msgspec.structs.replace(group, deleted=True)) for group in living))
            change.put(*(msgspec.structs.replace(member, online=False) for member in members))
            change.forget_recurrences(name)

    def adopt(self, group: str, partitions: Sequence[RegisteredPartition]) -> list[str]:
        """Adopt unknown subjects of a broker, rebuilding their routes from its catalog.

        A data directory may be older than the meta database, or the database was lost. A subject is adopted once its
        reported partitions, on any brokers, cover all LPs. Returns the names of partitions that no route names.
        """
        for facts in partitions:
            names.check("subject", facts.subject)
            names.check_partition(facts.name)
            check(facts)
        for first in range(0, len(partitions), ADOPTED_AT_ONCE):
            some = partitions[first : first + ADOPTED_AT_ONCE]
            self._adopt(group, some)
        return [
            facts.name for facts in partitions if PartitionId(facts.name, group) not in self._core.mirror.partitions
        ]

    @decided
    def _adopt(self, group: str, partitions: Sequence[RegisteredPartition]) -> None:
        mirror = self._core.mirror
        touched = set()
        for facts in partitions:
            place = PartitionId(facts.name, group)
            if place not in mirror.partitions and mirror.subject(facts.subject) is None:
                if len(self._found) < self._core.limits.subjects:
                    self._found.setdefault(facts.subject, {})[place] = facts
                touched.add(facts.subject)
        whole = {
            name: self._found[name] for name in sorted(touched & self._found.keys()) if not missing(self._found[name])
        }
        if not whole:
            return
        first = {name: min(found.values(), key=lambda facts: facts.created) for name, found in whole.items()}
        rows = [
            SubjectRow(name, text_of(facts.settings), facts.created or self._core.clock.now())
            for name, facts in first.items()
        ]
        again = [(mirror.subjects[row.name], row) for row in rows if row.name in mirror.subjects]
        with self._core.change() as change:
            change.replace(*again)
            change.insert(*(row for row in rows if row.name not in mirror.subjects))
            for name, found in whole.items():
                route = rebuilt(name, found, change.number)
                change.put(_stored(route))
                change.insert(*(PartitionAssignment(place.group, place.name, name) for place in route.partitions))
        for name in whole:
            del self._found[name]

    # --- views ----------------------------------------------------------------------------------

    def row(self, name: str) -> SubjectRow:
        """The row of a subject. Raises ``SubjectNotFound``."""
        row = self._core.mirror.subject(name)
        if row is None:
            raise SubjectNotFound(
                f"subject {name!r} does not exist; create it with 'plait subject create {name}'", subject=name
            )
        return row

    def matching(self, patterns: SubjectPatterns, *, refresh: bool = True) -> MatchedSubjects:
        """The subjects that the patterns cover, the first ``SUBSCRIBED_SUBJECTS_MAX`` of them.

        ``refresh``: include changes that other meta servers have just made.
        """
        if refresh:
            self._core.refresh()
        mirror, most = self._core.mirror, SUBSCRIBED_SUBJECTS_MAX
        found = {name for name in patterns.names if mirror.subject(name) is not None}
        listed = mirror.names()
        for prefix in patterns.prefixes:
            first = bisect_left(listed, prefix)
            # Names of one prefix are neighbours. Reserved names may be among them, so more are examined than wanted.
            some = takewhile(lambda name, prefix=prefix: name.startswith(prefix), islice(listed, first, None))  # type: ignore[misc]
            found.update(islice((name for name in some if not name.startswith(RESERVED)), most + 1))
        return MatchedSubjects(mirror.subjects_changed, sorted(found)[:most], len(found) > most)


def _stored(route: Route) -> RouteRow:
    return RouteRow(route.subject, route.version, msgspec.msgpack.encode(route))


def remembering(route: Route, leaving: Iterable[PartitionAssignment]) -> Route:
    """The route with the groups that the reports of these partitions name.

    ``start=`` applies only to a group that no partition of the subject knows. When retention has emptied a sealed
    partition, the partition is retired, and its broker drops it with its groups. A group whose consumers were stopped
    all that time would then look like a new group, and ``start=`` could skip messages in the later partitions. So the
    route remembers the group's name and the route version at which it began, until the group or the subject is deleted.
    """
    began = dict(route.began)
    for row in leaving:
        progress = progress_of(row)
        for name, version in progress.began.items() if progress is not None else ():
            # Re-insert the group, so that the groups are ordered by their last retirement.
            began[name] = min(version, began.pop(name, version))
    if began == route.began:
        return route
    if len(began) > REMEMBERED_GROUPS_MAX:
        # Forget broadcast groups first, and the oldest of each kind first.
        order = sorted(began, key=names.is_broadcast, reverse=True)
        log.warning(
            "subject %s: its retired partitions knew %d groups; %d are remembered, the others will count as new",
            route.subject,
            len(began),
            REMEMBERED_GROUPS_MAX,
        )
        began = {name: began[name] for name in order[-REMEMBERED_GROUPS_MAX:]}
    return msgspec.structs.replace(route, began=began)


def give_up(change: StoreChange, partitions: Sequence[PartitionAssignment]) -> None:
    """Mark partitions that no route names for dropping."""
    change.replace(*((row, msgspec.structs.replace(row, state="dropping")) for row in partitions))


def check_count(count: object) -> None:
    """Check a requested number of partitions."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= LOGICAL_PARTITIONS:
        raise InvalidArgument(f"{count!r} partitions are not possible; a subject has 1 to {LOGICAL_PARTITIONS}")


def check_groups(core: Core, places: Sequence[PartitionId]) -> None:
    """Check that partitions have valid names and existing broker groups."""
    for place in places:
        names.check_partition(place.name)
        core.mirror.check_group(place.group)


def new_places(subject: str, groups: Iterator[str], taken: Callable[[PartitionId], bool]) -> list[PartitionId]:
    """One new partition per broker group, named like the subject, or with the next free number there."""
    places: list[PartitionId] = []
    next_number: dict[str, int] = {}
    for group in groups:
        number = next_number.get(group, 0)
        while taken(place := PartitionId(f"{subject}#{number}" if number else subject, group)):
            number += 1
        next_number[group] = number + 1
        places.append(place)
    return places
