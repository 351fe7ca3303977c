"""Joins of clients: which memberships are admitted, and the groups that their first member creates."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from plait.errors import GroupBusy, GroupMismatch, LimitExceeded, PlaitError, SubjectNotFound
from plait.meta.core import Core, decided
from plait.meta.database.mirror import GroupKey
from plait.meta.database.schema import AllocationRow, GroupRow, MemberRow
from plait.meta.database.store import StoreChange
from plait.meta.members.allocation import unallocated
from plait.model import names
from plait.model.settings import GroupSettings, group_settings, text_of


class Joining:
    """Decides about memberships and groups, and writes them."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def agree(self, wanted: dict[GroupKey, GroupSettings]) -> bool:
        """True if all groups exist with these settings."""
        mirror = self._core.mirror
        return all(
            mirror.settings.get(key) == settings and not mirror.groups[key].deleted and mirror.subject(key[0])
            for key, settings in wanted.items()
        )

    def join(self, client: str, wanted: dict[GroupKey, GroupSettings]) -> dict[GroupKey, PlaitError]:
        """Write the client's joins and leaves. Returns the refused memberships with their reasons."""
        mirror = self._core.mirror
        known = mirror.memberships.get(client, set())
        refused: dict[GroupKey, PlaitError] = {}
        new_groups: list[GroupRow] = []
        for key, settings in wanted.items():
            try:
                if not self._admit(key, settings, len(new_groups), joins=key not in known):
                    new_groups.append(GroupRow(*key, text_of(settings)))
            except PlaitError as error:
                # Only this membership is refused; the client keeps the others.
                error.details.update(subject=key[0], group=key[1])
                refused[key] = error
        joins = [key for key in wanted if key not in known and key not in refused]
        leaves = [key for key in known if key not in wanted or key in refused]
        if joins or leaves:
            with self._core.change() as change:
                self._found(change, new_groups)
                change.put(
                    *(MemberRow(*key, client, online=True) for key in joins),
                    *(MemberRow(*key, client, online=False) for key in leaves),
                )
        return refused

    def _admit(self, key: GroupKey, settings: GroupSettings, founded: int, *, joins: bool) -> bool:
        """Check that the client may join. Returns False if the group must be created first."""
        mirror, limits = self._core.mirror, self._core.limits
        subject, name = key
        names.check("subject", subject)
        names.check_group(name)
        if mirror.subject(subject) is None:
            raise SubjectNotFound(
                f"subject {subject!r} does not exist; create it with 'plait subject create {subject}'", subject=subject
            )
        group = mirror.groups.get(key)
        if group is None or group.deleted:
            if len(mirror.groups) + founded >= limits.groups:
                raise LimitExceeded(
                    f"group limit reached ({limits.groups} per cluster, limit `groups`); "
                    "delete unused groups or raise it",
                    limit="groups",
                    value=limits.groups,
                )
            return False
        if mirror.settings[key] != settings:
            raise GroupMismatch(
                f"group {name!r} of subject {subject!r} is {mirror.settings[key]}, this member asks for {settings}; "
                "use the same settings or another group name",
                subject=subject,
                group=name,
                has=str(mirror.settings[key]),
                asked=str(settings),
            )
        if joins and len(mirror.members.get(key, ())) >= limits.members_per_group:
            raise LimitExceeded(
                f"member limit of group {name!r} of subject {subject!r} reached ({limits.members_per_group} per group, "
                "limit `members_per_group`); close idle consumers or raise it",
                limit="members_per_group",
                value=limits.members_per_group,
            )
        return True

    def _found(self, change: StoreChange, groups: Sequence[GroupRow]) -> None:
        """Create groups. A group whose name was used before continues with higher epochs."""
        mirror = self._core.mirror
        before = [
            (mirror.groups[row.subject, row.name], row) for row in groups if (row.subject, row.name) in mirror.groups
        ]
        change.replace(*before)
        change.insert(*(row for row in groups if (row.subject, row.name) not in mirror.groups))
        number, body = change.number, unallocated(change.number).encode()
        ordered = [row for row in groups if group_settings(row.settings).ordered]
        change.put(*(AllocationRow(row.subject, row.name, number, 0, body) for row in ordered))

    @decided
    def forget(self, subject: str, name: str) -> None:
        """Delete a group without members. A later group of the same name continues with higher epochs."""
        mirror, key = self._core.mirror, (subject, name)
        row = mirror.groups.get(key)
        if row is None or row.deleted:
            return
        if members := sorted(mirror.members.get(key, ())):
            named = ", ".join(members[:3])
            raise GroupBusy(
                f"group {name!r} of {subject!r} has {names.counted(len(members), 'connected consumer')} "
                f"({named}); stop {'it' if len(members) == 1 else 'them'} first",
                subject=subject,
                group=name,
                consumers=len(members),
            )
        with self._core.change() as change:
            change.replace((row, msgspec.structs.replace(row, deleted=True)))
