"""Transactional messages for SQLAlchemy: rows of an outbox become messages, and handled messages leave a row.

``Outbox`` adds a message as a row in the user's own transaction; a relay sends the committed rows, in order per key,
and deletes them when they are stored. ``Dedup`` records the id of a message in the transaction of its handler, so that
a redelivery has no second effect. Applications import this package by itself: ``import plait`` does not load it. It may
import the client.
"""

from plait.outbox.dedup import Dedup
from plait.outbox.outbox import Outbox
from plait.outbox.relay import Relay

__all__ = ["Dedup", "Outbox", "Relay"]
