"""How a group distributes its messages."""

from __future__ import annotations

from enum import StrEnum


class ShareMode(StrEnum):
    """The share mode of a consumer and its group."""

    #: Any consumer takes any message.
    SHARED = "shared"
    #: The owner of an LP takes its messages, in order per key.
    ORDERED = "ordered"
    #: The owner of an LP takes its messages; a failure holds nothing back.
    AFFINITY = "affinity"
    #: Every consumer takes all messages.
    BROADCAST = "broadcast"

    @property
    def locks(self) -> bool:
        """Each LP has one owner at a time."""
        return self in (ShareMode.ORDERED, ShareMode.AFFINITY)
