"""Ordered consumers for tests: the locks, rows and acks of a client, step by step.

An ``Owner`` follows the rules of a client: it handles a row only while it owns the lock of its LP, and the rows of a
key one after another. It returns rows that it has not begun when a lock leaves, and reports the rows that it holds when
it attaches again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from plait.broker.groups.group import NackOutcome
from plait.broker.groups.ordered.lease_grants import LeaseGrant
from plait.broker.groups.ordered.ordered_group import OrderedGroup
from plait.client.send.open_rows import hash_keys
from plait.frame.columns import Column
from plait.frame.view import frames_in
from plait.model.logical_partitions import lp_set, lps_of, runs_of
from plait.model.settings import SubjectSettings
from tests.support.broker_node import Node, Producer, Sent

SUBJECT, GROUP = "orders", "billing"
TOKENS = itertools.count(7)
#: Newer than any route.
NEWEST = 2**62


class Held(NamedTuple):
    """A row that an owner holds."""

    sequence: int
    #: The sequence of the next row of its frame.
    end: int
    key: str
    lp: int
    body: bytes
    tag: int
    epoch: int
    attempt: int


def make_subject(node: Node, order: str = "strict") -> None:
    node.broker.create_subject(SUBJECT, SubjectSettings(order=order))
    node.turn()


def keyed(node: Node, producer: Producer, rows: list[tuple[str, bytes]], subject: str = SUBJECT) -> Sent:
    """Send one frame of (key, body) rows; an empty key means none."""
    keys = [key for key, _ in rows]
    sent = node.submit(
        producer.frame(subject, *(body for _, body in rows), keys=keys, key_hashes=hash_keys(keys, len(keys)))
    )
    node.turn()
    return sent


class Owner:
    """One ordered consumer."""

    def __init__(self, node: Node, client: str, **settings: Any) -> None:
        self.node = node
        self.client = client
        self.settings = settings
        #: The session token; each process has a different one.
        self.token = next(TOKENS)
        self.wants: list[tuple[int, int, int, int]] = []
        self.rows: list[Held] = []
        self.rights: dict[int, int] = {}
        self.lease_until = 0.0
        self.leased: LeaseGrant | None = None
        #: Return rows by LP and not row by row.
        self.by_lps = False
        #: Acked ranges include rows of their frame that were returned.
        self.reaches = False
        #: The rows of each delivered frame, and the rows that were returned.
        self.frames: list[list[Held]] = []
        self.back: set[Held] = set()
        self.attach()

    def attach(self) -> None:
        holds = [(row.sequence, row.sequence + 1, row.epoch) for row in self.rows]
        self.consumer = self.node.attach(
            SUBJECT, GROUP, self.client, ordered=True, holds=holds, token=self.token, **self.settings
        )
        self.rows = [row._replace(tag=0, end=row.sequence + 1) for row in self.rows]
        self.frames, self.back = [], set()

    @property
    def group(self) -> OrderedGroup:
        group = self.consumer.group
        assert isinstance(group, OrderedGroup)
        return group

    @property
    def valid(self) -> bool:
        return self.node.clock.monotonic() < self.lease_until

    def lease(self, wants: Sequence[tuple[int, ...]] | None = None, route: int = NEWEST) -> LeaseGrant:
        """Ask for locks, and return the rows of those that the broker does not grant."""
        if wants is not None:
            self.wants = [(each[0], each[1], each[2], each[3] if len(each) > 3 else 0) for each in wants]
        asked = self.node.clock.monotonic()
        leased = self.node.broker.leases.ask(self.consumer, self.wants, [], [], route)
        self.node.turn()
        self.leased = leased
        self.lease_until = asked + leased.seconds
        self.rights = {lp: epoch for first, end, epoch in leased.owned for lp in range(first, end)}
        self.give_back([row for row in self.rows if row.lp not in self.rights])
        return leased

    def pull(self, count: int = 1000, size: int = 1 << 20) -> list[Held]:
        pulled = self.node.pull(self.consumer, count, size)
        [delivery] = pulled.answers
        rows: list[Held] = []
        if delivery is not None and delivery.count:
            frames = frames_in(b"".join(delivery.parts))
            for frame, (first, last, attempt), tag in zip(frames, delivery.ranges, delivery.tags, strict=True):
                sequences = frame.sequences()
                hashes = frame.key_hashes()
                lps = lps_of(sequences, hashes).tolist()
                numbers = sequences.tolist()
                assert (numbers[0], numbers[-1] + 1) == (first, last)
                keys = frame.binary(Column.KEY).to_pylist() if frame.has(Column.KEY) else [b""] * frame.count
                bodies = frame.binary(Column.BODY).to_pylist()
                ends = [*numbers[1:], numbers[-1] + 1]
                self.frames.append(
                    [
                        Held(*values, tag, frame.epoch, attempt)
                        for values in zip(numbers, ends, [key.decode() for key in keys], lps, bodies, strict=True)
                    ]
                )
                rows += self.frames[-1]
        self.rows += rows
        return rows

    def pull_all(self) -> list[Held]:
        """Pull until nothing is delivered."""
        rows: list[Held] = []
        while some := self.pull():
            rows += some
        return rows

    def first_of(self, key: str) -> Held:
        return next(row for row in sorted(self.rows) if row.key == key)

    def ready(self) -> list[Held]:
        """The rows that may be handled now: the first of each key whose lock is valid."""
        seen: set[str] = set()
        ready = []
        for row in sorted(self.rows):
            if row.key and row.key in seen:
                continue
            seen.add(row.key)
            if row.lp in self.rights and self.valid:
                ready.append(row)
        return ready

    def ack(self, *rows: Held) -> bool:
        """Ack rows; adjacent rows of one frame are one range. Returns whether the broker answered."""
        ranges: list[tuple[int, int, int]] = []
        tags: list[int] = []
        for row in sorted(self._reached(rows) if self.reaches else rows):
            if ranges and tags[-1] == row.tag and row.tag and ranges[-1][1:] == (row.sequence, row.epoch):
                ranges[-1] = (ranges[-1][0], row.end, row.epoch)
            else:
                ranges.append((row.sequence, row.end, row.epoch))
                tags.append(row.tag)
        for row in rows:
            self.rows.remove(row)
        answered: list[bool] = []
        self.node.broker.ack(self.consumer, ranges, lambda: answered.append(True), tags)
        self.node.turn()
        return bool(answered)

    def _reached(self, rows: Sequence[Held]) -> set[Held]:
        """These rows, and the returned rows next to them in their frames."""
        reached = set(rows)
        for frame in self.frames:
            for near, far in [*pairwise(frame), *pairwise(frame[::-1])]:
                if near in reached and far in self.back:
                    reached.add(far)
        return reached

    def nack(self, row: Held, delay: float | None = 0.0, **failure: Any) -> None:
        """Nack a row. If that holds back its key, return the later rows of the key."""
        self.rows.remove(row)
        self._nack([row], NackOutcome(delay, **failure))
        if self.group.policy.strict and row.key:
            self.give_back([each for each in self.rows if each.key == row.key and each.sequence > row.sequence])

    def give_back(self, rows: list[Held]) -> None:
        """Return rows without counting an attempt."""
        given = set(rows)
        self.back |= given
        self.rows = [row for row in self.rows if row not in given]
        if self.by_lps and all(row.tag and row.key for row in rows):
            self._give_back_lps(rows)
        elif rows:
            self._nack(rows, NackOutcome(0.0, counted=False))

    def _give_back_lps(self, rows: list[Held]) -> None:
        """Return rows by LP: each range has the rows of these LPs between two rows that stay held."""
        lps = {row.lp for row in rows}
        ranges: list[tuple[int, int, int]] = []
        tags: list[int] = []
        for tag in {row.tag for row in rows}:
            given = {row for row in rows if row.tag == tag}
            stay = [row for row in self.rows if row.tag == tag and (row.lp in lps or not row.key)]
            begin = True
            for row in sorted([*given, *stay]):
                if row not in given:
                    begin = True
                elif begin or ranges[-1][2] != row.epoch:
                    ranges.append((row.sequence, row.end, row.epoch))
                    tags.append(tag)
                    begin = False
                else:
                    ranges[-1] = (ranges[-1][0], row.end, row.epoch)
        if ranges:
            runs = runs_of(lp_set((lp, lp + 1) for lp in lps))
            self.node.broker.leases.give_back(self.consumer, runs, ranges, tags)
            self.node.turn()

    def _nack(self, rows: list[Held], failure: NackOutcome) -> None:
        ranges = [(row.sequence, row.sequence + 1 if row.tag == 0 else row.end, row.epoch) for row in rows]
        self.node.broker.nack(self.consumer, ranges, None, failure, [row.tag for row in rows])
        self.node.turn()
