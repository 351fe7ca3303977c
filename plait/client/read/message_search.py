"""``MessageSearch``: the calls of a client that find messages and explain where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta

from plait.client.arguments import Duration, limit_of
from plait.client.net.router import Router
from plait.client.read.query import QueryResult, QueryRun, caps_of, continued, target_of
from plait.client.types import Message, MessageId, Receipt
from plait.errors import InvalidArgument
from plait.limits import QUERY_COUNT_MAX, QUERY_SCAN_BYTES, QUERY_SCAN_COUNT, QUERY_SCAN_SECONDS, ClientLimits
from plait.model import names
from plait.model.filter_terms import TagFilter


class MessageSearch:
    """Base of ``Client``."""

    limits: ClientLimits
    _router: Router
    _now: Callable[[], int]

    def _check_open(self) -> None:
        raise NotImplementedError

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
