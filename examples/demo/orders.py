"""What the demo sends: the life of orders, in events that must not change their order."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

SUBJECT = "order.events"
STEPS = ("created", "paid", "pushed", "done")
#: Orders of one producer that are under way at the same time, so that their events lie between each other's.
OPEN_ORDERS = 50

#: What a consumer tells of each message it handled.
HANDLED = np.dtype([("sequence", "<u8"), ("number", "<u4"), ("producer", "<u2"), ("attempt", "<u2")])


class Event(msgspec.Struct, frozen=True):
    """One message. ``number`` counts the events of its producer from 0."""

    order: str
    step: str
    producer: int
    number: int


def events(producer: int, orders: int) -> Iterator[Event]:
    """All events of a producer, in the order it sends them."""
    number = 0
    for first in range(0, orders, OPEN_ORDERS):
        names = [f"order-{producer}-{order}" for order in range(first, min(first + OPEN_ORDERS, orders))]
        for step in STEPS:
            for name in names:
                yield Event(name, step, producer, number)
                number += 1
