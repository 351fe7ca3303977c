"""Limits of what is sent to subjects and delivered to groups in a second."""

from __future__ import annotations

from plait.client.net.admin_calls import Calls
from plait.model.rate import Rate
from plait.wire.admin.subjects import DESCRIBE_GROUP, SET_RATE


class RateAdmin(Calls):
    """The operations of ``plait subject set --send-rate`` and ``plait group set --rate``."""

    async def set_send_rate(
        self, subject: str, *, messages_per_second: float | None = None, bytes_per_second: float | None = None
    ) -> Rate | None:
        """Limit what all producers together send to a subject; without a value there is no limit. Returns the limit.

        A send beyond the limit waits and is not lost. Each partition enforces its share: its logical partitions of
        1024. The limit outlasts restarts, and a broker that is not reachable gets it when it is.
        """
        return await self._set_rate(subject, None, Rate(messages_per_second, bytes_per_second))

    async def set_group_rate(
        self,
        subject: str,
        group: str,
        *,
        messages_per_second: float | None = None,
        bytes_per_second: float | None = None,
    ) -> Rate | None:
        """Limit what all consumers of a group together get; without a value there is no limit. Returns the limit.

        Retries count as well. Each partition enforces its share, as with ``set_send_rate``.
        """
        # ``GroupNotFound`` for a name that no partition knows.
        await self._each(await self._places(subject), DESCRIBE_GROUP, group=group)
        return await self._set_rate(subject, group, Rate(messages_per_second, bytes_per_second))

    async def _set_rate(self, subject: str, group: str | None, rate: Rate) -> Rate | None:
        wanted = rate if rate.limited else None
        await self._run(SET_RATE, subject=subject, group=group, rate=wanted)
        return wanted
