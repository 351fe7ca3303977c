"""The terms under which a consumer attaches, and the checks of the arguments that they are made from."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import EllipsisType
from typing import Any, NamedTuple

from plait.client.arguments import Duration, seconds_of, start_of, to_datetime
from plait.client.consume.failure import EpochRange
from plait.errors import InvalidArgument
from plait.model import names
from plait.model.filter_terms import FilterTerms
from plait.model.retry_policy import Retry
from plait.model.settings import ShareMode, check_fair_by
from plait.model.subject_patterns import SubjectPatterns
from plait.wire import messages as m

log = logging.getLogger("plait.client")


class Terms(NamedTuple):
    """The settings that a consumer attaches with, the same on each partition."""

    subject: str
    group: str | None
    client: str
    start: Any
    delivery: str
    mode: ShareMode
    retry: Retry | None = None
    #: The route version that the group began with.
    began: int = 0
    #: True if a subject that does not exist is created.
    creates: bool = True
    #: The filter that the consumer states, or the newest one that it knows of its group.
    filter: FilterTerms | None = None
    states_filter: bool = False
    #: The version of the newest filter that it knows.
    filter_version: int = 0
    #: What identifies a tenant: "key", or a header; None: the group is not fair.
    fair_by: str | None = None

    @property
    def tracks(self) -> bool:
        """True if rows need outcomes. False for at_most_once: pulled rows are done unless ``close`` returns them."""
        return self.delivery != "at_most_once"

    def learned(self, attached: m.AttachReply) -> Terms:
        """The terms with the filter that the group has in a partition, if that is newer."""
        if attached.filter_version <= self.filter_version:
            return self
        wanted = self.filter if self.states_filter else attached.filter
        return self._replace(filter=wanted, filter_version=attached.filter_version)

    def with_filter_of(self, newer: Terms) -> Terms:
        return self._replace(filter=newer.filter, filter_version=newer.filter_version)

    def attach_request(self, name: str, partition: int, holds: list[EpochRange], token: int) -> m.AttachRequest:
        """The request that attaches the consumer to the partition ``name``, of whose rows it has the ranges ``holds``.

        ``partition`` is the number that the partition had in the session before; 0: there was none.
        """
        return m.AttachRequest(
            name,
            self.group,
            self.client,
            self.start,
            self.delivery,
            holds,
            partition,
            self.retry,
            self.mode.locks,
            self.mode is ShareMode.AFFINITY,
            token,
            self.began,
            self.filter,
            self.states_filter,
            self.filter_version,
            self.fair_by,
        )


class ConsumerArguments(NamedTuple):
    """The arguments that ``client.consumer`` and ``@app.subscriber`` have in common."""

    subject: str | Iterable[str]
    group: str | EllipsisType | None
    broadcast: bool
    delivery: str
    start: Any
    prefetch: int | None
    retry: Retry | None
    ordered: bool
    affinity: str | None
    handling: Duration | None
    filter: FilterTerms | None = None
    fair_by: str | None = None

    @property
    def subjects(self) -> SubjectPatterns:
        """The subjects; refuses invalid names."""
        return SubjectPatterns.of(self.subject)

    def checked(self) -> tuple[str | None, ShareMode]:
        """The group and its share mode; refuses invalid arguments and combinations that contradict each other."""
        group = None if self.broadcast else self.group
        if isinstance(group, EllipsisType):
            raise InvalidArgument(
                f"a consumer of {str(self.subjects)!r} needs a group: name one, as in group='billing', or use "
                "broadcast=True to get every message"
            )
        if group is not None:
            names.check_group(group)
        if self.delivery not in ("at_least_once", "at_most_once"):
            raise InvalidArgument(f"delivery {self.delivery!r} is not known; use 'at_least_once' or 'at_most_once'")
        if self.retry is not None and not isinstance(self.retry, Retry):
            raise InvalidArgument(f"retry is {self.retry!r}; use plait.Retry(...)")
        start_of(self.start, 0)
        mode = self._share_mode(group)
        if self.fair_by is not None:
            check_fair_by(self.fair_by)
            if mode is not ShareMode.SHARED:
                raise InvalidArgument(f"fair_by={self.fair_by!r} is for shared groups; this consumer is {mode.value}")
        return group, mode

    def _share_mode(self, group: str | None) -> ShareMode:
        if not isinstance(self.ordered, bool):
            raise InvalidArgument(f"ordered must be True or False, not {self.ordered!r}")
        if self.affinity not in (None, "key"):
            raise InvalidArgument(f"affinity {self.affinity!r} is not known; use 'key'")
        if self.ordered and self.affinity:
            raise InvalidArgument("ordered=True already gives a key's messages to one member; leave out affinity='key'")
        locks = self.ordered or self.affinity is not None
        if self.handling is not None:
            if not locks:
                raise InvalidArgument(
                    "handling= applies to ordered=True and affinity='key' only: other consumers have no locks to lose"
                )
            if seconds_of(self.handling) <= 0:
                raise InvalidArgument(f"handling must be more than 0, not {self.handling!r}")
        if not locks:
            return ShareMode.BROADCAST if group is None else ShareMode.SHARED
        if group is None and self.ordered:
            raise InvalidArgument(
                "a broadcast cannot be ordered: every member gets every message, so no key has one owner"
            )
        if group is None:
            raise InvalidArgument("a broadcast cannot have affinity: every member gets every message")
        if self.delivery == "at_most_once" and self.ordered:
            raise InvalidArgument(
                "at_most_once cannot be ordered: a message that is not acked cannot hold back the next one"
            )
        if self.delivery == "at_most_once":
            raise InvalidArgument(
                "at_most_once cannot have affinity: a key moves to another member when its messages are acked"
            )
        return ShareMode.ORDERED if self.ordered else ShareMode.AFFINITY


class PauseNotices:
    """Logs each pause of the group of a consumer once."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        #: The beginning of the last pause that was logged.
        self._since = 0

    def note(self, terms: Terms, since: int) -> None:
        if since != self._since:
            self._since = since
            log.warning(
                "group %s of %s is paused since %s: its consumers get no messages until 'plait group resume'",
                terms.group or f"of {terms.client}",
                terms.subject,
                to_datetime(since).isoformat(timespec="seconds"),
            )
