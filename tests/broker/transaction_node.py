"""Helpers for tests of transactions: producers that send half messages, decide, and answer checks."""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.broker.transactions.transaction_table import StoredTransaction
from plait.errors import PlaitError
from plait.frame.builder import build_frame
from plait.frame.header import FLAG_UNSEQUENCED
from tests.broker.schedule_node import SECOND, run_due
from tests.support.broker_node import Node, Sent

PRODUCERS = "shop"


class Tx:
    """A client's side of one transaction."""

    def __init__(self, number: int, producer_group: str = PRODUCERS) -> None:
        self.id = number
        self.producer_group = producer_group
        self.next = 1
        self.last: dict[str, int] = {}
        #: (subject, body) of the messages that the broker has accepted.
        self.messages: list[tuple[str, bytes]] = []

    def begin(self, node: Node) -> Tx:
        node.broker.transactions.begin(self.id, self.producer_group)
        return self

    def frame(self, node: Node, subject: str, *bodies: bytes, delay: float = 0.0, **columns: Any) -> Sent:
        """The next frame of half messages."""
        now = node.clock.now()
        parts = build_frame(
            bodies,
            producer=self.id,
            first=self.next,
            previous=self.last.get(subject, 0),
            send_time=now,
            deliver_at=now + int(delay * SECOND) if delay else 0,
            flags=FLAG_UNSEQUENCED,
            note=self.producer_group.encode(),
            **columns,
        )
        self.next += len(bodies)
        self.last[subject] = self.next - 1
        return Sent(subject, parts.tobytes(), bodies)

    def submit(self, node: Node, sent: Sent) -> Sent:
        """Submit a frame; an immediate refusal becomes its error."""
        try:
            node.broker.submit(node.broker.transactions.partition_of(sent.subject), sent.view, sent.answer)
        except PlaitError as error:
            sent.answer(None, error)
        return sent

    def send(self, node: Node, subject: str, *bodies: bytes, delay: float = 0.0, **columns: Any) -> Sent:
        """Send half messages and finish the turn."""
        sent = self.submit(node, self.frame(node, subject, *bodies, delay=delay, **columns))
        node.turn()
        assert sent.acknowledged, sent.answers
        self.messages += [(subject, body) for body in bodies]
        return sent


def begun(node: Node, number: int = 7, producer_group: str = PRODUCERS) -> Tx:
    return Tx(number, producer_group).begin(node)


def decide(node: Node, tx: Tx, *, commit: bool, rows: int | None = None) -> None:
    """Decide, and deliver what is due."""
    node.broker.transactions.decide(tx.id, commit=commit, rows=rows)
    run_due(node)
    run_due(node)


class Polled:
    """A poll for checks, and its answer."""

    def __init__(self, *, gone: bool = False) -> None:
        self.answers: list[list[int]] = []
        self.gone = gone

    def answer(self, found: list[StoredTransaction]) -> bool:
        if self.gone:
            return False
        self.answers.append([each.id for each in found])
        return True


def poll(node: Node, wait: float = 20.0, producer_group: str = PRODUCERS, *, gone: bool = False) -> Polled:
    """Poll for checks and finish the turn."""
    polled = Polled(gone=gone)
    node.broker.check_backs.poll(producer_group, wait, polled.answer)
    node.turn()
    return polled


def hashes(*lps: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Key hashes of these logical partitions."""
    return np.array(lps, np.uint64)
