"""Settings of subjects and groups. The meta database stores them as JSON, so that a later version can add fields."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from plait.errors import InvalidArgument, LimitExceeded
from plait.limits import AGE_SECONDS_MAX, LIMITED_GROUPS_MAX, PAUSED_GROUPS_MAX, RETENTION_BYTES_MAX
from plait.model import names
from plait.model.rate import Rate

#: Characters of the name of a header that identifies a tenant: it is stored with the settings of a group.
FAIR_BY_LENGTH_MAX = 256


class ShareMode(StrEnum):
    """The share mode of a consumer and its group."""

    #: Any consumer gets any message.
    SHARED = "shared"
    #: The owner of an LP gets its messages, in order per key.
    ORDERED = "ordered"
    #: The owner of an LP gets its messages; a failed message does not hold back later ones.
    AFFINITY = "affinity"
    #: Every consumer gets all messages.
    BROADCAST = "broadcast"

    @property
    def locks(self) -> bool:
        """True if each LP has at most one owner at a time."""
        return self in (ShareMode.ORDERED, ShareMode.AFFINITY)


class SubjectSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Settings of a subject; None means the broker's default."""

    #: Retention may remove messages older than this.
    retention_seconds: float | None = None
    #: Retention keeps at least this many bytes of the newest messages.
    retention_bytes: int | None = None
    #: Strict: a failed message holds back its key. Best tried: it does not.
    order: Literal["best_tried", "strict"] = "best_tried"
    #: Group → since when it is paused, in microseconds since 1970: its consumers get no messages. Partitions that the
    #: subject gets later have the same settings, so the group is paused there too.
    paused: dict[str, int] = {}
    #: The limit of what is stored; of what each group is delivered. Each partition enforces its share.
    send_rate: Rate | None = None
    group_rates: dict[str, Rate] = {}

    def __post_init__(self) -> None:
        if self.order not in ("best_tried", "strict"):
            raise InvalidArgument(f"order is {self.order!r}; use best_tried or strict")
        for name, most in (("retention_seconds", AGE_SECONDS_MAX), ("retention_bytes", RETENTION_BYTES_MAX)):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value <= most):
                raise InvalidArgument(
                    f"{name} is {value!r}; use a number above 0 and up to {most:g}, or None for the default"
                )


def check_fair_by(fair_by: str) -> str:
    """Refuse what cannot identify a tenant: it is "key", or the name of a header."""
    if not isinstance(fair_by, str) or not 0 < len(fair_by) <= FAIR_BY_LENGTH_MAX:
        raise InvalidArgument(
            f"fair_by is {fair_by!r:.200}; use 'key', or the name of a header of 1 to {FAIR_BY_LENGTH_MAX} characters"
        )
    return fair_by


def priority_refused(subject: str) -> InvalidArgument:
    """The error for a message with a priority on a strict subject."""
    return InvalidArgument(
        f"subject {subject!r} is strict: its messages are handled in their order, so they have no priority; leave "
        "priority out, or use a subject with order='best_tried'"
    )


def with_pause(settings: SubjectSettings, group: str, now: int) -> SubjectSettings:
    """The settings with a group paused since ``now``, or since it was paused before; with 0 it is not paused."""
    paused = {**settings.paused}
    if not now:
        paused.pop(group, None)
    elif group not in paused and len(paused) >= PAUSED_GROUPS_MAX:
        raise LimitExceeded(
            f"{PAUSED_GROUPS_MAX} groups of the subject are paused, the limit is reached (limit `PAUSED_GROUPS_MAX`); "
            "resume some of them",
            limit="PAUSED_GROUPS_MAX",
            value=PAUSED_GROUPS_MAX,
        )
    else:
        paused.setdefault(group, now)
    return msgspec.structs.replace(settings, paused=paused)


def with_rate(settings: SubjectSettings, group: str | None, rate: Rate | None) -> SubjectSettings:
    """The settings with this limit of a group or, with ``group`` None, of sends; None: there is none."""
    rate = rate if rate is not None and rate.limited else None
    if group is None:
        return msgspec.structs.replace(settings, send_rate=rate)
    rates = {name: each for name, each in settings.group_rates.items() if name != group}
    if rate is not None:
        if len(rates) >= LIMITED_GROUPS_MAX:
            raise LimitExceeded(
                f"{LIMITED_GROUPS_MAX} groups of the subject have a rate, the limit is reached (limit "
                "`LIMITED_GROUPS_MAX`); remove the rates of some of them",
                limit="LIMITED_GROUPS_MAX",
                value=LIMITED_GROUPS_MAX,
            )
        rates[group] = rate
    return msgspec.structs.replace(settings, group_rates=rates)


class GroupSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Settings of a group. Its first member decides them."""

    #: True if each logical partition has at most one owner at a time.
    ordered: bool = False
    #: True for an ordered group in which a failed message never holds back its key, whatever the subject's order.
    affinity: bool = False

    def __str__(self) -> str:
        return names.sharing(self.ordered, self.affinity)


_subject = msgspec.json.Decoder(SubjectSettings)
_group = msgspec.json.Decoder(GroupSettings)


def subject_settings(text: str) -> SubjectSettings:
    return _subject.decode(text)


def group_settings(text: str) -> GroupSettings:
    return _group.decode(text)


def text_of(settings: SubjectSettings | GroupSettings) -> str:
    """The JSON text that the database stores."""
    return msgspec.json.encode(settings).decode()
