"""``MessageSearch``: the calls of a client that find messages and explain where they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Final

from plait.client.admin.admin import Admin
from plait.client.arguments import Duration, limit_of
from plait.client.net.router import Router
from plait.client.read.explanation import Explanation, explained, undecided
from plait.client.read.query import QueryResult, QueryRun, caps_of, continued, message_id_of, target_of
from plait.client.types import Message, MessageId, Receipt
from plait.errors import DeadLetterNotFound, GroupNotFound, InvalidArgument, TransactionNotFound
from plait.limits import QUERY_COUNT_MAX, QUERY_SCAN_BYTES, QUERY_SCAN_COUNT, QUERY_SCAN_SECONDS, ClientLimits
from plait.model import names
from plait.model.filter_terms import TagFilter
from plait.wire.admin.why import EXPLAIN_MESSAGE

#: Delayed messages that ``why`` examines in each subject, the next ones that are due.
DELAYED_EXAMINED_MAX: Final = 10_000
#: How long the broker may read a history.
WHY_SECONDS: Final = 60.0


class MessageSearch:
    """Base of ``Client``."""

    limits: ClientLimits
    admin: Admin
    _router: Router
    _now: Callable[[], int]
    _check_open: Callable[[], None]

    async def query(
        self,
        subject: str,
        *,
        key: str | int | None = None,
        message_id: MessageId | Receipt | Message | str | None = None,
        where: str | None = None,
        tags: TagFilter | Iterable[str] | None = None,
        since: datetime | timedelta | str | None = None,
        until: datetime | timedelta | str | None = None,
        limit: int = 100,
        token: str | None = None,
        scan_count: int = QUERY_SCAN_COUNT,
        scan_bytes: int = QUERY_SCAN_BYTES,
        scan_seconds: Duration = QUERY_SCAN_SECONDS,
    ) -> QueryResult:
        """Find stored messages that match everything that is given, in the order of their store times.

        ``key`` and ``message_id`` are found through an index; ``where`` and ``tags`` (as in ``reader``) examine the
        messages stored in [``since``, ``until``), which are times or "-5m" before now. The query ends with ``limit``
        messages, or when the brokers have examined ``scan_count`` messages, ``scan_bytes`` or for ``scan_seconds``:
        then the result is ``partial``. ``query(subject, token=result.token)`` continues it. Reading does not create the
        subject: raises ``SubjectNotFound``, or ``InvalidFilter`` with the place of a mistake.
        """
        self._check_open()
        names.check("subject", subject)
        target, places = target_of(subject, key, message_id, where, tags, since, until, self._now()), None
        if token is not None:
            target, places = continued(subject, token, target)
        if limit_of(limit) > QUERY_COUNT_MAX:
            raise InvalidArgument(f"limit {limit} is over {QUERY_COUNT_MAX} (QUERY_COUNT_MAX); continue with the token")
        caps = caps_of(scan_count, scan_bytes, scan_seconds)
        return await QueryRun(self._router, self.limits, target, limit_of(limit), caps).run(places)

    async def why(
        self, message_id: MessageId | Receipt | Message | str, *, group: str, subject: str | None = None
    ) -> Explanation:
        """Explain where a message is for a group, and why, with the events of its history.

        Without ``subject`` the message is looked for in all subjects that the group consumes, which takes longer.
        """
        self._check_open()
        names.check_group(group)
        wanted = message_id_of(message_id)
        if subject is None and isinstance(message_id, Message):
            subject = message_id.subject
        subjects = [subject] if subject is not None else await self._subjects_of(group)
        for each in subjects:
            found = await self.query(each, message_id=wanted, limit=1)
            if found:
                return await self._explain(found[0], group)
            if found.partial:
                return Explanation(
                    wanted, group, f"It was not found yet: {found.reason}.", "unknown", each, partial=True
                )
        for each in subjects:
            for waiting in await self.admin.scheduled(each, limit=DELAYED_EXAMINED_MAX):
                if waiting.message_id == wanted:
                    text = f"The message is delayed in {waiting.partition}: it is due at {waiting.deliver_at}."
                    due = waiting.deliver_at
                    return Explanation(wanted, group, text, "delayed", each, waiting.partition, due=due)
        with contextlib.suppress(TransactionNotFound):
            # A half message has the number of its transaction.
            return undecided(wanted, group, await self.admin.transaction(f"{wanted.producer:016x}"))
        if not subjects:
            text = f"Group {group} consumes no subject. Name the subject of the message to look for it there."
            return Explanation(wanted, group, text, "unknown")
        where = f"subject {subject}" if subject is not None else f"the subjects of group {group}: {', '.join(subjects)}"
        text = (
            f"The message is not stored in {where}. It was never stored there, was cancelled or rolled back, or "
            "retention removed it."
        )
        return Explanation(wanted, group, text, "unknown", subject)

    async def _subjects_of(self, group: str) -> list[str]:
        return sorted({each.subject for each in await self.admin.groups() if each.group == group})

    async def _explain(self, message: Message, group: str) -> Explanation:
        route = await self._router.refresh(message.subject, create=False)
        node = self._router.node(route, message.partition.group)
        asked = EXPLAIN_MESSAGE.packet(subject=message.partition.name, group=group, sequence=message.sequence)
        try:
            state = EXPLAIN_MESSAGE.result(await node.request(asked, WHY_SECONDS))
        except GroupNotFound:
            text = (
                f"The message is stored in {message.partition} as sequence {message.sequence} since "
                f"{message.store_time}. Group {group} does not exist there."
            )
            return Explanation(
                message.message_id, group, text, "no_group", message.subject, message.partition, message.sequence
            )
        reason = None
        if state.state == "dead":
            with contextlib.suppress(DeadLetterNotFound):
                letter = await self.admin.dead_letter(
                    message.subject, group, message.sequence, partition=message.partition
                )
                reason = letter.reason
        return explained(message, group, state, reason)
