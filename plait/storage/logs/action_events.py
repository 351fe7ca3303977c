"""The events of the action log: one type of record for each action. All have 40 bytes: a frame of them is one array.

An event of the action log has the number of its group and the data epoch of the broker. Its time is that of its frame.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import ClassVar, get_args

import msgspec
import numpy as np

from plait.errors import FrameError


class Action(IntEnum):
    """The kind of an event."""

    PULL = 1
    ACK = 2
    NACK = 3
    OFFLINE = 4
    REWIND = 5
    SKIP = 6
    FORGET_CONSUMER = 7
    FORGET_GROUP = 8
    BURY = 9
    REVIVE = 10
    PURGE = 11
    CANCEL = 12
    LOCK = 13
    MOVE = 14
    HOLD = 15
    JOIN = 16
    PARK = 17
    RESUME = 18
    RETURN = 19
    FILTERED = 20
    TRANSACTION_COMMIT = 21
    TRANSACTION_ROLLBACK = 22
    TRANSACTION_CHECK = 23
    TRANSACTION_PARK = 24


#: Where an event stores its fields. All kinds have ``group``, ``epoch`` and ``action``; the class of a kind names its
#: other fields, in this order.
EVENT = np.dtype(
    [
        ("group", "<u4"),
        ("epoch", "<u4"),
        ("action", "u1"),
        ("attempt", "<u2"),
        ("flag", "?"),
        ("holder", "<u4"),
        ("start", "<u8"),
        ("end", "<u8"),
        ("value", "<i8"),
    ]
)
EVENT_SIZE = EVENT.itemsize
ATTEMPT_MAX = 0xFFFF
_HEAD = Struct("<IIB")


class Event(msgspec.Struct, gc=False):
    """What happened in a group. The fields of a kind are those of ``EVENT`` from ``attempt`` on, under other names."""

    action: ClassVar[Action]
    #: The bytes of the kind. It has zeros (``x``) in place of the fields of ``EVENT`` that the kind does not have.
    layout: ClassVar[Struct]


class DeliveryEvent(Event):
    """An event that has the number of deliveries of its rows; the log has at most ``ATTEMPT_MAX``."""

    attempt: int


class Pulled(DeliveryEvent):
    """The consumer received the rows."""

    action, layout = Action.PULL, Struct("<IIBH?IQQ8x")
    #: Rows below ``start`` that no consumer has begun are left.
    overtaking: bool
    consumer: int
    start: int
    end: int


class Acked(DeliveryEvent):
    """The rows are done. An at-most-once group records deliveries here, since it records no pulls."""

    action, layout = Action.ACK, Struct("<IIBH?IQQ8x")
    #: Of a delivery: as for a pull.
    overtaking: bool
    #: Here and in the other kinds: the consumer of a shared group, or the cursor of an ordered group.
    holder: int
    start: int
    end: int


class Nacked(DeliveryEvent):
    """The rows failed, and are delivered again when due."""

    action, layout = Action.NACK, Struct("<IIBH?IQQq")
    #: The consumer returned the rows before it handled them: the delivery does not count as an attempt.
    uncounted: bool
    holder: int
    start: int
    end: int
    due: int


class WentOffline(Event):
    """The rows that the consumer held are returned."""

    action, layout = Action.OFFLINE, Struct("<IIB3xI24x")
    consumer: int


class Rewound(Event):
    """The group delivers every row from ``sequence`` on, whether it is done or not."""

    action, layout = Action.REWIND, Struct("<IIB2x?IQ16x")
    #: Rows below ``sequence`` that are not done are skipped. Otherwise they stay as they are.
    skipping: bool
    #: Of an ordered group that skips rows: the new cursor that replaces all others; else 0.
    cursor: int
    sequence: int


class Skipped(Event):
    """Rows were lost to retention or damage before the group was done with them."""

    action, layout = Action.SKIP, Struct("<IIB2x?IQQq")
    #: ``lost`` is an estimate.
    estimated: bool
    #: 0 for a shared group.
    cursor: int
    start: int
    end: int
    #: For an ordered group: how many rows of the cursor.
    lost: int


class ForgotConsumer(Event):
    """The number of the consumer has no meaning from here on."""

    action, layout = Action.FORGET_CONSUMER, Struct("<IIB3xI24x")
    consumer: int


class ForgotGroup(Event):
    """The group is deleted."""

    action, layout = Action.FORGET_GROUP, Struct("<IIB31x")


class Buried(DeliveryEvent):
    """Delivered rows are out of attempts and become dead letters."""

    action, layout = Action.BURY, Struct("<IIBHxIQQ8x")
    holder: int
    start: int
    end: int


class Revived(Event):
    """Dead letters are delivered again."""

    action, layout = Action.REVIVE, Struct("<IIB3xIQQ8x")
    #: 0 for a shared group.
    cursor: int
    start: int
    end: int


class Purged(Event):
    """Dead letters are deleted."""

    action, layout = Action.PURGE, Struct("<IIB7xQQ8x")
    start: int
    end: int


class Cancelled(Event):
    """Delayed rows of a schedule partition are cancelled. The group is 0."""

    action, layout = Action.CANCEL, Struct("<IIB3xIQQq")
    partition: int
    start: int
    end: int
    due: int


class Locked(Event):
    """The consumer (0: none) owns the logical partitions [start, end) under a lock epoch."""

    action, layout = Action.LOCK, Struct("<IIB3xIQQq")
    consumer: int
    start: int
    end: int
    lock_epoch: int


class Moved(Event):
    """The logical partitions [start, end) move to the cursor ``to``, which is new or has the same position."""

    action, layout = Action.MOVE, Struct("<IIB3xIQQq")
    cursor: int
    start: int
    end: int
    to: int


class Held(Event):
    """A key of the logical partition ``lp`` moves to its own new cursor ``to``."""

    action, layout = Action.HOLD, Struct("<IIB3xIQQQ")
    cursor: int
    lp: int
    to: int
    key_hash: int


class Joined(Event):
    """The cursor ``other`` is merged into this one. ``next`` is the next sequence of both."""

    action, layout = Action.JOIN, Struct("<IIB3xIQQ8x")
    cursor: int
    other: int
    next: int


class Parked(Event):
    """The key of the cursor is parked, with the dead letter [start, end). Empty: it is in another partition."""

    action, layout = Action.PARK, Struct("<IIB3xIQQ8x")
    cursor: int
    start: int
    end: int


class Resumed(Event):
    """The key of the cursor is no longer parked."""

    action, layout = Action.RESUME, Struct("<IIB3xI24x")
    cursor: int


class Returned(DeliveryEvent):
    """After a join: rows below the next sequence of the cursor that are not done."""

    action, layout = Action.RETURN, Struct("<IIBHxIQQq")
    cursor: int
    start: int
    end: int
    due: int


class Filtered(Event):
    """The group's filter left out all rows of the cursor in [start, end): they are done without a delivery."""

    action, layout = Action.FILTERED, Struct("<IIB3xIQQq")
    #: 0 for a shared group.
    cursor: int
    start: int
    end: int
    #: How many rows of the cursor.
    rows: int


class TransactionCommitted(Event):
    """The transaction is committed: its half messages are published. The group of these four kinds is 0."""

    action, layout = Action.TRANSACTION_COMMIT, Struct("<IIB7xQ16x")
    transaction: int


class TransactionRolledBack(Event):
    """The transaction is rolled back: its half messages are deleted."""

    action, layout = Action.TRANSACTION_ROLLBACK, Struct("<IIB7xQ16x")
    transaction: int


class TransactionChecked(Event):
    """A producer was asked for the outcome of the transaction, for the ``count``-th time."""

    action, layout = Action.TRANSACTION_CHECK, Struct("<IIB7xQQ8x")
    transaction: int
    count: int


class TransactionParked(Event):
    """No producer is asked again: the transaction waits for an operator."""

    action, layout = Action.TRANSACTION_PARK, Struct("<IIB7xQ16x")
    transaction: int


#: Events about the rows [start, end) of the group's partition.
RowEvent = Pulled | Acked | Nacked | Skipped | Buried | Revived | Purged | Returned | Filtered
#: Events about a transaction.
TransactionEvent = TransactionCommitted | TransactionRolledBack | TransactionChecked | TransactionParked
OF_ROWS = frozenset(kind.action for kind in get_args(RowEvent))
KINDS: dict[int, type[Event]] = {
    kind.action: kind
    for kind in (*DeliveryEvent.__subclasses__(), *Event.__subclasses__())
    if kind is not DeliveryEvent
}
assert all(kind.layout.size == EVENT_SIZE == 40 for kind in KINDS.values())


def actions_with(*fields: str) -> list[Action]:
    return [kind.action for kind in KINDS.values() if not {*fields}.isdisjoint(kind.__struct_fields__)]


def unpack_event(row: bytes) -> tuple[int, int, Event]:
    group, epoch, action = _HEAD.unpack_from(row)
    kind = KINDS.get(action)
    if kind is None:
        raise FrameError(f"unknown action {action}")
    return group, epoch, kind(*kind.layout.unpack(row)[3:])
