"""``client.admin`` for blocking code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Literal, Unpack

from plait.client.admin.admin import Admin as LoopAdmin
from plait.client.admin.admin import GroupInfo, SubjectDetails, SubjectInfo
from plait.client.admin.cluster_admin import AllocationInfo, BrokerInfo, LostPartition, Partitions, RouteInfo, State
from plait.client.admin.dead_letter_admin import DeadLetter, DeadQueue, DeadReason, LetterQuery
from plait.client.admin.parked_key_admin import ParkedKey
from plait.client.admin.schedule_admin import ScheduleCount, ScheduledMessage
from plait.client.arguments import Duration, Start
from plait.client.blocking.loop_thread import RunInLoop
from plait.client.net.admin_calls import Partition
from plait.model.retry_policy import Retry


class Admin:
    """What ``plait subject``, ``group``, ``dlq``, ``schedule`` and ``cluster`` do, as methods."""

    def __init__(self, admin: LoopAdmin, run: RunInLoop) -> None:
        self._admin = admin
        self._run = run

    def subjects(self) -> list[SubjectInfo]:
        """All subjects by name, an entry for each partition."""
        return self._run(self._admin.subjects())

    def subject(self, subject: str) -> SubjectDetails:
        """A subject, its partitions and its groups."""
        return self._run(self._admin.subject(subject))

    def create_subject(
        self,
        subject: str,
        *,
        retention: Duration | None = None,
        retention_bytes: int | None = None,
        order: Literal["best_tried", "strict"] = "best_tried",
        partitions: int | None = None,
        groups: Sequence[str] | None = None,
    ) -> SubjectInfo:
        """A new subject; ``retention`` is how long its messages are kept (server default: None)."""
        return self._run(
            self._admin.create_subject(
                subject,
                retention=retention,
                retention_bytes=retention_bytes,
                order=order,
                partitions=partitions,
                groups=groups,
            )
        )

    def set_subject(
        self,
        subject: str,
        *,
        retention: Duration | Literal["default"] | None = None,
        retention_bytes: int | Literal["default"] | None = None,
    ) -> SubjectInfo:
        """Change how long, or how much of, a subject's messages are kept; "default" is what the server keeps."""
        return self._run(self._admin.set_subject(subject, retention=retention, retention_bytes=retention_bytes))

    def delete_subject(self, subject: str) -> None:
        """Delete a subject with its messages and groups, for good."""
        self._run(self._admin.delete_subject(subject))

    def groups(self, subject: str | None = None, *, partition: Partition | None = None) -> list[GroupInfo]:
        """The groups of a subject, of one of its partitions, or of all subjects."""
        return self._run(self._admin.groups(subject, partition=partition))

    def group(self, subject: str, group: str, *, partition: Partition | None = None) -> GroupInfo:
        """A group's progress; with several partitions, the sum over them."""
        return self._run(self._admin.group(subject, group, partition=partition))

    def reset_group(self, subject: str, group: str, start: Start, *, partition: Partition | None = None) -> int:
        """Move an idle group to "earliest", "latest", a sequence or a time; the sequence it goes on from."""
        return self._run(self._admin.reset_group(subject, group, start, partition=partition))

    def set_group(self, subject: str, group: str, *, retry: Retry) -> GroupInfo:
        """Change how an idle group retries; ``GroupBusy`` while it has consumers."""
        return self._run(self._admin.set_group(subject, group, retry=retry))

    def delete_group(self, subject: str, group: str) -> None:
        """Forget an idle group, its position and its dead letters, permanently."""
        self._run(self._admin.delete_group(subject, group))

    def server(self) -> dict[str, Any]:
        """Facts about the server."""
        return self._run(self._admin.server())

    # --- the cluster ----------------------------------------------------------------------------

    def route(self, subject: str) -> RouteInfo:
        """Where a subject's messages go now, and where they are to go."""
        return self._run(self._admin.route(subject))

    def expand_subject(self, subject: str, partitions: Partitions) -> RouteInfo:
        """Spread a subject over so many partitions (more or fewer than now), or over these ("name@group")."""
        return self._run(self._admin.expand_subject(subject, partitions))

    def brokers(self) -> list[BrokerInfo]:
        """All brokers of the cluster, by their groups."""
        return self._run(self._admin.brokers())

    def set_broker_state(self, group: str, state: State) -> None:
        """Use a broker group less: with "R", "W" or "NRW" new partitions go to others; "RW" is as usual."""
        self._run(self._admin.set_broker_state(group, state))

    def forget_broker(self, group: str, *, lost: bool = False) -> list[LostPartition]:
        """Give up a broker group that will not come back; with ``lost`` also what was not consumed there."""
        return self._run(self._admin.forget_broker(group, lost=lost))

    def allocation(self, subject: str, group: str) -> AllocationInfo:
        """The members of a group, and who is to handle what."""
        return self._run(self._admin.allocation(subject, group))

    # --- parked keys ----------------------------------------------------------------------------

    def parked(self, subject: str, group: str, *, partition: Partition | None = None) -> list[ParkedKey]:
        """The parked keys of a group, those that wait longest first."""
        return self._run(self._admin.parked(subject, group, partition=partition))

    def resume_key(self, subject: str, group: str, key: str | int | ParkedKey) -> None:
        """Go on with a parked key: with the message that failed; ``KeyNotParked`` if it is not parked."""
        self._run(self._admin.resume_key(subject, group, key))

    def skip_key(self, subject: str, group: str, key: str | int | ParkedKey) -> None:
        """Go on with a parked key behind the message that failed, which stays a dead letter."""
        self._run(self._admin.skip_key(subject, group, key))

    def resume_all(self, subject: str, group: str) -> int:
        """``resume_key`` every parked key of a group; how many there were."""
        return self._run(self._admin.resume_all(subject, group))

    def skip_all(self, subject: str, group: str) -> int:
        """``skip_key`` every parked key of a group; how many there were."""
        return self._run(self._admin.skip_all(subject, group))

    # --- dead letters ---------------------------------------------------------------------------

    def dead_queues(self, subject: str | None = None) -> list[DeadQueue]:
        """The groups that have dead letters, of a subject or of all."""
        return self._run(self._admin.dead_queues(subject))

    def dead_letters(
        self,
        subject: str,
        group: str,
        *,
        partition: Partition | None = None,
        limit: int = 100,
        bodies: bool = False,
        **select: Unpack[LetterQuery],
    ) -> list[DeadLetter]:
        """A group's dead letters, oldest first; with their bodies where asked for."""
        return self._run(
            self._admin.dead_letters(subject, group, partition=partition, limit=limit, bodies=bodies, **select)
        )

    def dead_letter(self, subject: str, group: str, sequence: int, *, partition: Partition | None = None) -> DeadLetter:
        """One dead letter with its body; ``DeadLetterNotFound`` when there is none."""
        return self._run(self._admin.dead_letter(subject, group, sequence, partition=partition))

    def dead_reasons(self, subject: str, group: str, *, partition: Partition | None = None) -> list[DeadReason]:
        """Why a group's messages died: types of errors and handlers, the most frequent first."""
        return self._run(self._admin.dead_reasons(subject, group, partition=partition))

    def resend_dead(
        self,
        subject: str,
        group: str,
        *,
        partition: Partition | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
        **select: Unpack[LetterQuery],
    ) -> int:
        """Deliver dead letters to their group again; how many. ``progress`` is called on the client's own thread."""
        return self._run(
            self._admin.resend_dead(
                subject, group, partition=partition, rate=rate, dry_run=dry_run, progress=progress, **select
            )
        )

    def purge_dead(
        self,
        subject: str,
        group: str,
        *,
        partition: Partition | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
        **select: Unpack[LetterQuery],
    ) -> int:
        """Give dead letters up for good; how many. The arguments are those of ``resend_dead``."""
        return self._run(
            self._admin.purge_dead(
                subject, group, partition=partition, rate=rate, dry_run=dry_run, progress=progress, **select
            )
        )

    # --- the schedule ---------------------------------------------------------------------------

    def scheduled(
        self,
        subject: str,
        *,
        partition: Partition | None = None,
        start: datetime | Duration | None = None,
        end: datetime | Duration | None = None,
        limit: int = 100,
    ) -> list[ScheduledMessage]:
        """Messages of a subject that are to be delivered from ``start`` up to ``end`` (times, or "5m" from now)."""
        return self._run(self._admin.scheduled(subject, partition=partition, start=start, end=end, limit=limit))

    def schedule_counts(
        self,
        subject: str | None = None,
        *,
        start: datetime | Duration | None = None,
        end: datetime | Duration | None = None,
        by: Literal["subject", "time"] = "subject",
    ) -> list[ScheduleCount]:
        """How many messages wait for their time, by subject or by when they are due."""
        return self._run(self._admin.schedule_counts(subject, start=start, end=end, by=by))

    def cancel_scheduled(
        self, subject: str, number: int, deliver_at: datetime, *, partition: Partition | None = None
    ) -> bool:
        """Call a message off by what its receipt says. True: it is never delivered; False: it was, or was cancelled."""
        return self._run(self._admin.cancel_scheduled(subject, number, deliver_at, partition=partition))

    def reschedule(
        self, subject: str, number: int, deliver_at: datetime, *, to: datetime, partition: Partition | None = None
    ) -> int:
        """Deliver a message at another time; its new number. ``NotScheduled``: it is too late for that."""
        return self._run(self._admin.reschedule(subject, number, deliver_at, to=to, partition=partition))
