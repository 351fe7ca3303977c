"""The messages of the demo: the events of orders, which must stay in order."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

SUBJECT = "order.events"
STEPS = ("created", "paid", "pushed", "done")
#: Concurrent orders of one producer: their events are interleaved.
OPEN_ORDERS = 50

#: The record that a consumer writes for each handled message.
HANDLED = np.dtype([("sequence", "<u8"), ("number", "<u4"), ("producer", "<u2"), ("attempt", "<u2")])


class Event(msgspec.Struct, frozen=True):
    """One message. ``number`` is its position among the events of its producer, from 0."""

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
