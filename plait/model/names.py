"""Name rules, the same at both ends of the wire."""

from __future__ import annotations

from plait.errors import InvalidName
from plait.limits import (
    NAME_LENGTH_MAX,
    NAME_PATTERN,
    NAME_RULE,
    PARTITION_LENGTH_MAX,
    PARTITION_PATTERN,
    RESERVED,
    TAG_LENGTH_MAX,
)

#: A broadcast consumer is a group of its own, named after its client.
BROADCAST_PREFIX = "%broadcast%"


def check(kind: str, name: object) -> str:
    """A subject, group or client name, or ``InvalidName`` with the rule."""
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LENGTH_MAX or not NAME_PATTERN.fullmatch(name):
        raise InvalidName(f"{kind} name {_shown(name)} is not allowed: use {NAME_RULE}", kind=kind, name=_shown(name))
    return name


def check_group(name: object) -> str:
    """The name of a consumer group that a user gives; those that begin with % are Plait's own."""
    text = check("group", name)
    if text.startswith(RESERVED):
        raise InvalidName(
            f"group name {_shown(text)} is not allowed: names that begin with {RESERVED} are reserved, as those of "
            "broadcast consumers are",
            kind="group",
            name=_shown(text),
        )
    return text


def of_group(group: str | None, client: str) -> str:
    """The name that servers know a group by. No group: the broadcast of a client, which is a group of its own."""
    return BROADCAST_PREFIX + client if group is None else group


def is_broadcast(name: str) -> bool:
    """It is the name of a broadcast."""
    return name.startswith(BROADCAST_PREFIX)


def check_partition(name: object) -> str:
    """The name of a partition: that of its subject, or with something behind a #."""
    if not isinstance(name, str) or not 0 < len(name) <= PARTITION_LENGTH_MAX or not PARTITION_PATTERN.fullmatch(name):
        raise InvalidName(
            f"partition name {_shown(name)} is not allowed: use {NAME_RULE}, and #", kind="partition", name=_shown(name)
        )
    return name


def check_tag(tag: object) -> str:
    """A tag: any text without control characters."""
    if not isinstance(tag, str) or not 0 < len(tag) <= TAG_LENGTH_MAX or not tag.isprintable():
        raise InvalidName(
            f"tag {_shown(tag)} is not allowed: use 1 to {TAG_LENGTH_MAX} printable characters",
            kind="tag",
            name=_shown(tag),
        )
    return tag


def sharing(ordered: bool, affinity: bool) -> str:
    """How the members of a group share its messages, in the words that users ask for it with."""
    return "affinity='key'" if affinity else f"ordered={ordered}"


def counted(count: int, noun: str) -> str:
    """So many of something, as texts for people name them: "1 file", "2,000 files"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _shown(name: object) -> str:
    text = repr(name)
    return text if len(text) <= 80 else text[:77] + "..."
