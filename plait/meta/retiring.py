"""Finished partitions: spans leave a route when their rows are removed, and a lost broker group can be removed (R26).

For each partition with sealed LPs, its broker reports which of them each group has finished, and below which sequence
rows are removed. The report is stored with the partition, so it outlives the broker. Clients get it with the route.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from itertools import cycle, islice
from typing import TypeVar

import msgspec
import numpy as np

from plait.errors import InvalidArgument, NoBroker
from plait.limits import LOGICAL_PARTITIONS
from plait.meta.brokers import Brokers
from plait.meta.core import Core, decided
from plait.meta.database.schema import PartitionAssignment
from plait.meta.subjects import ReportedProgress, Subjects, new_places, progress_of
from plait.model import route as routes
from plait.model.logical_partitions import Numbers, spread
from plait.model.route import PartitionId, Route
from plait.wire.admin.cluster import LostPartition, PartitionProgress
from plait.wire.admin.subjects import Remembered

log = logging.getLogger("plait.meta")

_R = TypeVar("_R", ReportedProgress, Route)


class _StillFiring(Exception):
    """A partition gets firings that its broker has not confirmed; it is retired with a later report."""


class Retiring:
    """Stores reports of brokers and removes finished spans from routes."""

    def __init__(self, core: Core, brokers: Brokers, subjects: Subjects) -> None:
        self._core = core
        self._brokers = brokers
        self._subjects = subjects

    def report(self, group: str, broker: str, reports: Sequence[PartitionProgress]) -> bool:
        """Store a broker's reports, then remove finished spans from the routes of their subjects.

        Returns False if the broker must register again.
        """
        if not self._brokers.knows(group, broker):
            return False
        self._note(group, reports)
        for subject in sorted({report.subject for report in reports}):
            self._retire(subject)
        return True

    @decided
    def _note(self, group: str, reports: Sequence[PartitionProgress]) -> None:
        pairs = []
        for report in reports:
            row = self._core.mirror.partitions.get(PartitionId(report.name, group))
            # The report of an earlier partition of the same name has an older route version.
            if row is None or row.subject != report.subject or row.state != "kept" or not 0 < row.told <= report.route:
                continue
            body = msgspec.msgpack.encode(ReportedProgress(report.passed, report.gone_below, report.began))
            if body != row.progress:
                pairs.append((row, msgspec.structs.replace(row, progress=body)))
        if pairs:
            with self._core.change() as change:
                change.replace(*pairs)

    @decided
    def _retire(self, subject: str) -> None:
        """Remove spans whose rows are removed, the oldest span of each LP first, until nothing changes."""
        mirror = self._core.mirror
        if mirror.subject(subject) is None:
            return
        route = before = mirror.route(subject)
        while True:
            after = route
            for place in after.partitions:
                progress = progress_of(mirror.partitions[place])
                if progress is not None and progress.gone_below >= 0 and place in after.partitions:
                    after = routes.retire(after, after.partitions.index(place), progress.gone_below)
            if after is route:
                break
            route = after
        if route is before:
            return
        leaving = set(before.partitions) - set(route.partitions)
        with contextlib.suppress(_StillFiring), self._core.change() as change:
            # One version for all the steps.
            self._subjects.publish(change, msgspec.structs.replace(route, version=before.version + 1))
            if leaving and change.has_firings(leaving):
                raise _StillFiring

    # --- groups of retired partitions -------------------------------------------------------------

    def remembered(self, subject: str, name: str) -> Remembered:
        """Whether retired partitions, or partitions with sealed LPs, knew a group.

        For partitions with sealed LPs, the stored reports are used, because their broker may be switched off. Answered
        from the mirror while the database is down.
        """
        self._core.refresh_if_up()
        mirror = self._core.mirror
        if mirror.subject(subject) is None:
            return Remembered(0, None)
        route = mirror.route(subject)
        reports = (progress_of(mirror.partitions[place]) for place in mirror.partitions_of.get(subject, ()))
        known = [report.began.get(name) for report in reports if report is not None] + [route.began.get(name)]
        first = min((began for began in known if began is not None), default=None)
        return Remembered(route.version, first, name in route.began)

    @decided
    def forget_group(self, subject: str, name: str) -> bool:
        """Forget a deleted group. Returns True if the route remembered it."""
        mirror = self._core.mirror
        if mirror.subject(subject) is None:
            return False
        route = mirror.route(subject)
        remembers = name in route.began
        pairs = []
        # A partition may be retired before its broker reports again.
        for place in sorted(mirror.partitions_of.get(subject, ())):
            row = mirror.partitions[place]
            progress = progress_of(row)
            if progress is not None and name in progress.began:
                body = msgspec.msgpack.encode(_without(progress, name))
                pairs.append((row, msgspec.structs.replace(row, progress=body)))
        if remembers or pairs:
            with self._core.change() as change:
                change.replace(*pairs)
                if remembers:
                    after = msgspec.structs.replace(_without(route, name), version=route.version + 1)
                    self._subjects.publish(change, after)
        return remembers

    # --- a broker group that is lost --------------------------------------------------------------

    def forget(self, group: str, *, lost: bool = False) -> list[LostPartition]:
        """Remove a broker group that will not return: its LPs move to other broker groups and its messages are lost.

        Returns the partitions with unconsumed messages. Raises ``InvalidArgument`` if there are any and ``lost`` is
        False.
        """
        missed = self._discard(group, lost=lost)
        lost_text = "; ".join(map(str, missed)) or "no unconsumed messages"
        log.warning("broker group %s was removed; lost with it: %s", group, lost_text)
        return missed

    @decided
    def _discard(self, group: str, *, lost: bool) -> list[LostPartition]:
        mirror = self._core.mirror
        mirror.check_group(group)
        if self._brokers.state(group) != "NRW" or self._brokers.is_there(group):
            raise InvalidArgument(f"broker group {group!r} is alive; stop its broker first")
        places = sorted(
            place for place, row in mirror.partitions.items() if place.group == group and row.state == "kept"
        )
        found = [self._lost(place) for place in places]
        missed = [each for each in found if each.takes or each.groups]
        if missed and not lost:
            raise InvalidArgument(
                f"broker group {group!r} may have unconsumed messages: {'; '.join(map(str, missed))}; "
                "start its broker again, or discard them with --lost"
            )
        self._forget(group, places)
        return missed

    def _lost(self, place: PartitionId) -> LostPartition:
        mirror = self._core.mirror
        row = mirror.partitions[place]
        route = mirror.route(row.subject)
        takes = int((routes.current(route) == route.partitions.index(place)).sum())
        progress = progress_of(row)
        fences = _closed_fences(route, place)
        if progress is None:
            behind = {"(not reported)": int((fences > 0).sum())} if (fences > 0).any() else {}
        else:
            behind = {
                name: count
                for name, runs in sorted(progress.passed.items())
                if (count := int(((fences > 0) & (spread(runs) < fences)).sum()))
            }
        return LostPartition(row.subject, str(place), takes, behind)

    def _forget(self, group: str, places: Sequence[PartitionId]) -> None:
        mirror = self._core.mirror
        with self._core.change() as change:
            for subject in sorted({mirror.partitions[place].subject for place in places}):
                route = mirror.route(subject)
                rest = [each for each in route.partitions if each.group != group]
                named = {route.partitions[index] for index in set(routes.target(route).tolist())}
                targets = [each for each in rest if each in named] or self._others(subject, group)
                self._subjects.publish(change, routes.give_up(route, group, targets))
            # The lost broker cannot carry out an order to drop them.
            gone = [row for row in change.rows if isinstance(row, PartitionAssignment) and row.broker_group == group]
            change.replace(*((row, msgspec.structs.replace(row, state="gone", progress=b"")) for row in gone))
            change.remove(*mirror.brokers[group].values())
        self._brokers.forgotten(group)

    def _others(self, subject: str, group: str) -> list[PartitionId]:
        fit = [each for each in self._brokers.available() if each != group]
        if not fit:
            raise NoBroker(f"no other broker group is available for subject {subject!r}; start another broker first")
        return new_places(subject, islice(cycle(fit), 1), self._core.mirror.is_taken)


def _without(record: _R, group: str) -> _R:
    """A report or a route without a deleted group."""
    began = {name: version for name, version in record.began.items() if name != group}
    return msgspec.structs.replace(record, began=began)


def _closed_fences(route: Route, place: PartitionId) -> Numbers:
    """The highest fence of each LP in a partition; 0 without one."""
    index = route.partitions.index(place)
    fences = np.zeros(LOGICAL_PARTITIONS, np.int64)
    for history in route.histories:
        for span in history.spans:
            if span.partition == index and span.fence:
                fences[history.first : history.end] = np.maximum(fences[history.first : history.end], span.fence)
    return fences
