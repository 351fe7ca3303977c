"""The rules for names. Clients and servers check names with the same functions."""

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
    """Return a subject, group or client name if it is valid, else raise ``InvalidName`` with the rule."""
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LENGTH_MAX or not NAME_PATTERN.fullmatch(name):
        raise _refusal(kind, f"{kind} name", name, f"use {NAME_RULE}")
    return name


def check_group(name: object) -> str:
    """Check the name of a group that a user chose; names that begin with % are reserved for Plait."""
    text = check("group", name)
    if text.startswith(RESERVED):
        rule = f"names that begin with {RESERVED} are reserved (broadcast consumers use them); choose another name"
        raise _refusal("group", "group name", text, rule)
    return text


def of_group(group: str | None, client: str) -> str:
    """The group name that servers use: ``group``, or the broadcast group of the client when ``group`` is None."""
    return BROADCAST_PREFIX + client if group is None else group


def is_broadcast(name: str) -> bool:
    """True if it is the name of a broadcast group."""
    return name.startswith(BROADCAST_PREFIX)


def check_partition(name: object) -> str:
    """Check the name of a partition: its subject's name, possibly followed by # and a suffix."""
    if not isinstance(name, str) or not 0 < len(name) <= PARTITION_LENGTH_MAX or not PARTITION_PATTERN.fullmatch(name):
        raise _refusal("partition", "partition name", name, f"use {NAME_RULE}, and #")
    return name


def check_tag(tag: object) -> str:
    """Check a tag: any text without control characters."""
    if not isinstance(tag, str) or not 0 < len(tag) <= TAG_LENGTH_MAX or not tag.isprintable():
        raise _refusal("tag", "tag", tag, f"use 1 to {TAG_LENGTH_MAX} printable characters")
    return tag


def sharing(ordered: bool, affinity: bool) -> str:
    """How a group distributes its messages, as the argument of ``subscribe`` that asks for it."""
    return "affinity='key'" if affinity else f"ordered={ordered}"


def counted(count: int, noun: str) -> str:
    """A count with its noun, for messages to people: "1 file", "2,000 files"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _refusal(kind: str, what: str, name: object, rule: str) -> InvalidName:
    text = repr(name)
    shown = text if len(text) <= 80 else text[:77] + "..."
    return InvalidName(f"{what} {shown} is not allowed: {rule}", kind=kind, name=shown)
