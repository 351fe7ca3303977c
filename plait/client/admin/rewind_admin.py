"""Moves groups to another position, in all their partitions, and says before what changes."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import msgspec

from plait.client.arguments import Start, start_of, to_datetime
from plait.client.net.admin_calls import Calls, Partition
from plait.errors import GroupNotFound, InvalidArgument, PlaitError, RewindIncomplete, SubjectNotFound
from plait.wire.admin.rewinds import REWIND_GROUP, PartitionRewind
from plait.wire.admin.subjects import DESCRIBE_GROUP, GROUP_REMEMBERED, PAUSE_GROUP


class Rewind(msgspec.Struct, frozen=True):
    """What a rewind of a group changes, or would change; the counts are sums over the partitions."""

    subject: str
    group: str
    #: The position: "earliest", "latest", a sequence, or a time. A relative time such as "-5m" is a time here, so that
    #: a repeated rewind has the same position.
    to: str | int | datetime
    #: Whether messages below the position that were not handled are skipped.
    skip: bool
    partitions: list[PartitionRewind]
    #: True if the group has consumed partitions that have left the route: no rewind brings their messages again.
    left_route: bool

    @property
    def again(self) -> int:
        """Messages that come again."""
        return sum(each.again for each in self.partitions)

    @property
    def handled(self) -> int:
        """How many of ``again`` the group had handled."""
        return sum(each.handled for each in self.partitions)

    @property
    def open(self) -> int:
        """Messages below the position that the group has not handled and still gets."""
        return sum(each.open for each in self.partitions)

    @property
    def skipped(self) -> int:
        """Messages below the position that the group has not handled and never gets."""
        return sum(each.skipped for each in self.partitions)

    @property
    def gone(self) -> int:
        """Messages that were asked for and that retention has removed."""
        return sum(each.gone for each in self.partitions)

    @property
    def estimated(self) -> bool:
        """True if a count is an estimate."""
        return any(each.estimated for each in self.partitions)

    @property
    def between(self) -> tuple[datetime, datetime] | None:
        """When the first and the last message that comes again, or is skipped, were stored; None: there is none."""
        found = [
            (each.first, each.last) for each in self.partitions if each.first is not None and each.last is not None
        ]
        if not found:
            return None
        return to_datetime(min(first for first, _ in found)), to_datetime(max(last for _, last in found))


class RewindAdmin(Calls):
    """The operations of ``plait group rewind``, ``pause`` and ``resume``."""

    async def pause_group(self, subject: str, group: str) -> datetime:
        """Give no more messages to the consumers of a group, until it is resumed; returns since when it is paused.

        Its consumers stay attached and may ack what they hold. The pause outlasts restarts and applies to partitions
        that the subject gets later. Brokers that are not reachable pause the group when they are.
        """
        # ``GroupNotFound`` for a name that no partition knows.
        await self._each(await self._places(subject), DESCRIBE_GROUP, group=group)
        since = await self._run(PAUSE_GROUP, subject=subject, group=group, paused=True)
        assert since is not None
        return to_datetime(since)

    async def resume_group(self, subject: str, group: str) -> datetime | None:
        """Continue a paused group; returns since when it was paused, None if it was not paused."""
        since = await self._run(PAUSE_GROUP, subject=subject, group=group, paused=False)
        return None if since is None else to_datetime(since)

    async def rewind_group(
        self,
        subject: str,
        group: str,
        to: Start,
        *,
        skip: bool = False,
        preview: bool = False,
        partition: Partition | None = None,
    ) -> Rewind:
        """Deliver every message from ``to`` on to an idle group, whether it has handled it or not.

        ``to`` is "earliest", "latest", a time, "-5m", or a sequence of one partition. Messages before it that the group
        has not handled still come; with ``skip``, and always with "latest", they are skipped. ``preview`` changes
        nothing and returns what would change. ``GroupBusy`` while the group has consumers.

        Nothing changes unless every partition could be asked before. If a broker fails later, ``RewindIncomplete``
        names the partitions that did not change, and the same rewind can be repeated.
        """
        position = start_of(to, self._now())
        if position is None:
            raise InvalidArgument("to is None; use 'earliest', 'latest', a sequence, a datetime or '-5m'")
        skip = skip or position == "latest"
        if position[0] == "sequence":
            places = [await self._place(subject, partition, "sequences")]
        else:
            places = await self._places(subject, partition)
        asked: dict[str, Any] = {"group": group, "start": position, "skipping": skip}
        found = await self._each(places, REWIND_GROUP, **asked, preview=True)
        remembered = await self._run(GROUP_REMEMBERED, subject=subject, group=group, client="")
        kind, number = (position, 0) if isinstance(position, str) else position
        shown: str | int | datetime = to_datetime(number) if kind == "time" else number if kind == "sequence" else kind
        if preview:
            changes = [change for _, change in found]
        else:
            changes = await self._rewind([place for place, _ in found], subject, shown, asked)
        return Rewind(subject, group, shown, skip, changes, remembered.left_route)

    async def _rewind(
        self, places: list[Any], subject: str, shown: str | int | datetime, asked: dict[str, Any]
    ) -> list[PartitionRewind]:
        answers = await asyncio.gather(
            *(self._run(REWIND_GROUP, at=place.node, subject=place.name.name, **asked) for place in places),
            return_exceptions=True,
        )
        failed: dict[str, str] = {}
        done = []
        for place, answer in zip(places, answers, strict=True):
            if isinstance(answer, PartitionRewind):
                done.append(answer)
            elif isinstance(answer, PlaitError):
                # A partition whose group or subject was deleted meanwhile has no position to set.
                if not isinstance(answer, SubjectNotFound | GroupNotFound):
                    failed[str(place.name)] = answer.message
            else:
                raise answer
        if failed:
            group = asked["group"]
            named = "; ".join(f"{name}: {message}" for name, message in failed.items())
            raise RewindIncomplete(
                f"group {group!r} of {subject!r} was rewound to {shown} in {len(done)} of {len(places)} partitions; "
                f"repeat the rewind with the same position for the others ({named})",
                subject=subject,
                group=group,
                done=[change.partition for change in done],
                failed=failed,
            )
        return done
