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
    """The operations of ``plait subject``, ``group``, ``dlq``, ``schedule`` and ``cluster``."""

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
        """Create a subject; ``retention`` is how long its messages are kept (None: the server's default)."""
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
        """Change how long, or how many bytes of, a subject's messages are kept; "default": the server's default."""
        return self._run(self._admin.set_subject(subject, retention=retention, retention_bytes=retention_bytes))

    def delete_subject(self, subject: str) -> None:
        """Delete a subject with its messages and groups, permanently."""
        self._run(self._admin.delete_subject(subject))

    def groups(self, subject: str | None = None, *, partition: Partition | None = None) -> list[GroupInfo]:
        """The groups of a subject, of one of its partitions, or of all subjects."""
        return self._run(self._admin.groups(subject, partition=partition))

    def group(self, subject: str, group: str, *, partition: Partition | None = None) -> GroupInfo:
        """A group's progress; with several partitions, the sum over them."""
        return self._run(self._admin.group(subject, group, partition=partition))

    def reset_group(self, subject: str, group: str, start: Start, *, partition: Partition | None = None) -> int:
        """Move an idle group to "earliest", "latest", a sequence or a time; returns the sequence it continues from."""
        return self._run(self._admin.reset_group(subject, group, start, partition=partition))

    def set_group(self, subject: str, group: str, *, retry: Retry) -> GroupInfo:
        """Change the retry policy of an idle group; ``GroupBusy`` while it has consumers."""
        return self._run(self._admin.set_group(subject, group, retry=retry))

    def delete_group(self, subject: str, group: str) -> None:
        """Delete an idle group, its position and its dead letters, permanently."""
        self._run(self._admin.delete_group(subject, group))

    def server(self) -> dict[str, Any]:
        """Facts about the server."""
        return self._run(self._admin.server())

    # --- the cluster ----------------------------------------------------------------------------

    def route(self, subject: str) -> RouteInfo:
        """The route of a subject: which partitions take its messages now, and which are to."""
        return self._run(self._admin.route(subject))

    def expand_subject(self, subject: str, partitions: Partitions) -> RouteInfo:
        """Spread a subject over a number of partitions, more or fewer than now, or over named ones ("name@group")."""
        return self._run(self._admin.expand_subject(subject, partitions))

    def brokers(self) -> list[BrokerInfo]:
        """All brokers of the cluster, by their groups."""
        return self._run(self._admin.brokers())

    def set_broker_state(self, group: str, state: State) -> None:
        """Restrict the use of a broker group: with "R", "W" or "NRW" it gets no new partitions; "RW" lifts this."""
        self._run(self._admin.set_broker_state(group, state))

    def forget_broker(self, group: str, *, lost: bool = False) -> list[LostPartition]:
        """Remove a broker group that will not come back; with ``lost``, even if it has unconsumed messages."""
        return self._run(self._admin.forget_broker(group, lost=lost))

    def allocation(self, subject: str, group: str) -> AllocationInfo:
        """The members of a group and their shares."""
        return self._run(self._admin.allocation(subject, group))

    # --- parked keys ----------------------------------------------------------------------------

    def parked(self, subject: str, group: str, *, partition: Partition | None = None) -> list[ParkedKey]:
        """The parked keys of a group, longest wait first."""
        return self._run(self._admin.parked(subject, group, partition=partition))

    def resume_key(self, subject: str, group: str, key: str | int | ParkedKey) -> None:
        """Resume a parked key with the message that failed; ``KeyNotParked`` if it is not parked."""
        self._run(self._admin.resume_key(subject, group, key))

    def skip_key(self, subject: str, group: str, key: str | int | ParkedKey) -> None:
        """Resume a parked key after the message that failed, which stays a dead letter."""
        self._run(self._admin.skip_key(subject, group, key))

    def resume_all(self, subject: str, group: str) -> int:
        """``resume_key`` for every parked key of a group; returns their number."""
        return self._run(self._admin.resume_all(subject, group))

    def skip_all(self, subject: str, group: str) -> int:
        """``skip_key`` for every parked key of a group; returns their number."""
        return self._run(self._admin.skip_all(subject, group))

    # --- dead letters ---------------------------------------------------------------------------

    def dead_queues(self, subject: str | None = None) -> list[DeadQueue]:
        """The groups that have dead letters, of a subject or of all subjects."""
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
        """A group's dead letters, oldest first; with their bodies if ``bodies``."""
        return self._run(
            self._admin.dead_letters(subject, group, partition=partition, limit=limit, bodies=bodies, **select)
        )

    def dead_letter(self, subject: str, group: str, sequence: int, *, partition: Partition | None = None) -> DeadLetter:
        """One dead letter with its body; ``DeadLetterNotFound`` when there is none."""
        return self._run(self._admin.dead_letter(subject, group, sequence, partition=partition))

    def dead_reasons(self, subject: str, group: str, *, partition: Partition | None = None) -> list[DeadReason]:
        """Why a group's messages became dead letters: error types and handlers, most frequent first."""
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
        """Deliver dead letters to their group again; returns their number. The client's thread calls ``progress``."""
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
        """Delete dead letters permanently; returns their number. The arguments are those of ``resend_dead``."""
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
        """Messages of a subject that are due from ``start`` up to ``end`` (times, or durations from now as "5m")."""
        return self._run(self._admin.scheduled(subject, partition=partition, start=start, end=end, limit=limit))

    def schedule_counts(
        self,
        subject: str | None = None,
        *,
        start: datetime | Duration | None = None,
        end: datetime | Duration | None = None,
        by: Literal["subject", "time"] = "subject",
    ) -> list[ScheduleCount]:
        """The number of delayed messages that are not due yet, by subject or by due time."""
        return self._run(self._admin.schedule_counts(subject, start=start, end=end, by=by))

    def cancel_scheduled(
        self, subject: str, number: int, deliver_at: datetime, *, partition: Partition | None = None
    ) -> bool:
        """Cancel a delayed message. True: it is never delivered; False: it was delivered or cancelled before."""
        return self._run(self._admin.cancel_scheduled(subject, number, deliver_at, partition=partition))

    def reschedule(
        self, subject: str, number: int, deliver_at: datetime, *, to: datetime, partition: Partition | None = None
    ) -> int:
        """Change the due time of a message; returns its new number. ``NotScheduled``: it was delivered or cancelled."""
        return self._run(self._admin.reschedule(subject, number, deliver_at, to=to, partition=partition))
