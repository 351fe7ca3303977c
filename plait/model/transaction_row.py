"""A transaction that is not decided, as packets and admin requests have it."""

from __future__ import annotations

import msgspec


class TransactionRow(msgspec.Struct, array_like=True, frozen=True):
    """An undecided transaction."""

    id: int
    producer_group: str
    #: "open", "parked", or "committed" until all messages are published.
    state: str
    #: Wall time of the broker in microseconds.
    begun: int
    checks: int
    rows: int
    size: int
    #: The subjects of its messages.
    subjects: list[str]
    #: Its first messages: (subject, frame). Empty in a listing.
    frames: list[tuple[str, bytes]] = []
