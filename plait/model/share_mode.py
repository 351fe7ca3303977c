"""How a group distributes its messages."""

from __future__ import annotations

from enum import StrEnum


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
