"""Models of groups with filters: random filters and changes of them, nacks, resets, retention, crashes, checkpoints.

Each message has a tag. ``a`` matches every filter of a run, and ``d`` none; ``b`` and ``c`` match some. In every run, a
message gets its first attempt only if it matches the filter of that moment. A message that was left out is not
delivered any more, whatever happens. In the end the group is done with every message, and each ``a`` was handled.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from plait.broker.groups.group import AttachedConsumer
from plait.broker.groups.group_settings import NO_FILTER, GroupFilter, set_group_filter
from plait.broker.groups.shared_group import SharedGroup
from plait.broker.views import group_view
from plait.client.send.encoding import encode_headers, encode_tags
from plait.client.send.open_rows import hash_keys
from plait.filter import message_filter, scan_budget
from plait.filter.message_filter import compile_filter
from plait.limits import FILTER_PART_COUNT, FILTER_SCAN_FRAMES
from plait.model.filter_terms import FilterTerms, TagFilter
from plait.model.retry_policy import Retry
from plait.model.settings import SubjectSettings
from plait.storage.checkpoint import KEEP
from plait.storage.cursor import Cursor
from tests.broker.ordered_node import GROUP, SUBJECT, Held
from tests.broker.ordered_world import LPS, RETENTION, RETRY, SENT_MAX, Crash, World
from tests.support.broker_node import Node, Producer, Row
from tests.support.progress import within_cpu_seconds

TAGS = "abcd"
WANTED = [("a", "b"), ("a", "c"), ("a",), ("a", "b", "c")]


def tag_filter(tags: tuple[str, ...], how: int) -> FilterTerms:
    """A filter that matches these tags of ``TAGS``, written in one of three ways."""
    if how == 0:
        return FilterTerms(TagFilter(any=tags))
    if how == 1:
        return FilterTerms(TagFilter(none=tuple(tag for tag in TAGS if tag not in tags)))
    return FilterTerms(where=" OR ".join(f"letter = '{tag}'" for tag in tags))


def columns_of(tags: list[str], addresses: random.Random, group: str | None, *, plain: bool) -> dict[str, Any]:
    """The columns of messages with these tags. Some are addressed: a ``d`` to another group, other tags to ``group``.

    A ``d`` that is addressed has the tag ``a``: only the address keeps it away. ``plain``: every ``d`` is addressed.
    """
    groups = [b""] * len(tags)
    tags = tags.copy()
    for row, tag in enumerate(tags):
        if tag == "d" and (plain or addresses.random() < 0.5):
            tags[row], groups[row] = "a", b"other"
        elif group is not None and addresses.random() < 0.3:
            groups[row] = group.encode()
    return {
        "tags": [encode_tags([tag]) for tag in tags],
        "headers": [encode_headers({"letter": tag}) for tag in tags],
        "groups": groups if any(groups) else None,
    }


# --- shared groups --------------------------------------------------------------------------------


class SharedModel:
    """A broker with one group whose members share all messages."""

    def __init__(self, seed: int, kind: str) -> None:
        self.draw = random.Random(f"{seed} {kind}")
        self.kind = kind
        self.node = Node(
            flush=self.draw.choice(("sync", "async")),
            retention_seconds=RETENTION,
            message_segment_size=self.draw.choice((2048, 65536)),
        )
        self.node.broker.create_subject(SUBJECT, SubjectSettings())
        self.producer = Producer(7)
        self.wanted = self.draw.choice(WANTED)
        self.addresses = random.Random(f"{seed} {kind} addresses")
        #: True if the group has no filter: only addresses keep messages away.
        self.plain = self.addresses.random() < 0.3
        if self.plain:
            self.wanted = ("a", "b", "c")
        self.version = 1
        #: Sequence → tag.
        self.tags: list[str] = []
        self.held: dict[str, dict[int, Row]] = {}
        #: Rows that were delivered, acked or rejected, and left out.
        self.delivered: set[int] = set()
        self.done: set[int] = set()
        self.left: set[int] = set()
        self.lost_below = 0
        self.attach("c1")

    # --- looking --------------------------------------------------------------------------------

    @property
    def group(self) -> SharedGroup:
        [group] = self.node.partition(SUBJECT).groups.values()
        assert isinstance(group, SharedGroup)
        return group

    def look(self) -> None:
        """Find rows that were left out."""
        group = self.group
        for sequence in range(self.lost_below, len(self.tags)):
            known = sequence in self.done or group.failures.dead.overlap(sequence, sequence + 1)
            if not known and passed_by(group.cursor, sequence):
                assert self.tags[sequence] != "a", f"{sequence} matches every filter and was left out"
                self.left.add(sequence)

    # --- steps ----------------------------------------------------------------------------------

    def attach(self, client: str) -> AttachedConsumer:
        terms = tag_filter(self.wanted, self.draw.randrange(3))
        wanted = NO_FILTER if self.plain else GroupFilter(terms, version=self.version)
        group = None if self.kind == "broadcast" else GROUP
        if group is None and not self.plain and (known := self.node.partition(SUBJECT).groups):
            [has] = known.values()
            wanted = GroupFilter(has.definition.filter, True, self.version)
        delivery = self.kind if self.kind == "at_most_once" else "at_least_once"
        holds = [(row.sequence, row.sequence + 1, row.epoch) for row in self.held.get(client, {}).values()]
        self.held.setdefault(client, {})
        return self.node.attach(
            SUBJECT,
            group,
            client,
            wanted=wanted,
            delivery=delivery,
            holds=holds,
            start="earliest",
            retry=Retry(first=1.0),
        )

    def consumer(self) -> AttachedConsumer:
        client = "c1" if self.kind == "broadcast" else self.draw.choice(("c1", "c2", "c3"))
        known = self.group.consumers.get(client)
        if known is None or not known.connected:
            known = self.attach(client)
        self.node.contact(known)
        return known

    def send(self) -> None:
        tags = self.draw.choices(TAGS, k=self.draw.randrange(1, 40))
        bodies = [b"%d" % (len(self.tags) + number) for number in range(len(tags))]
        own = None if self.kind == "broadcast" else GROUP
        columns = columns_of(tags, self.addresses, own, plain=self.plain)
        self.node.submit(self.producer.frame(SUBJECT, *bodies, **columns))
        self.node.turn()
        self.tags += tags

    def pull(self) -> None:
        consumer = self.consumer()
        pulled = self.node.pull(consumer, self.draw.choice((1, 5, 100)), self.draw.choice((1, 300, 1 << 20)))
        attempts = {row: attempt for start, end, attempt in pulled.ranges for row in range(start, end)}
        rows = pulled.rows
        assert sorted(attempts) == sorted(row.sequence for row in rows)
        for row in rows:
            sequence, attempt = row.sequence, attempts[row.sequence]
            assert row.body == b"%d" % sequence
            assert sequence not in self.done, f"{sequence} was done and is delivered again"
            assert sequence not in self.left, f"{sequence} was left out and is delivered"
            assert attempt > 1 or self.tags[sequence] in self.wanted, f"{sequence} does not match {self.wanted}"
            assert attempt == 1 or sequence in self.delivered, f"{sequence} had no first attempt"
            self.delivered.add(sequence)
            self.held[consumer.client][sequence] = row
            if self.kind == "at_most_once":
                self.done.add(sequence)

    def finish(self) -> None:
        """Ack, fail, reject or return some rows that a consumer holds."""
        consumer = self.consumer()
        held = self.held[consumer.client]
        for row in self.draw.sample(sorted(held.values()), min(len(held), self.draw.randrange(1, 12))):
            del held[row.sequence]
            place = (row.sequence, row.sequence + 1, row.epoch)
            what = self.draw.random()
            if self.kind == "at_most_once":
                known = self.group.delivered.get(consumer.id)  # type: ignore[attr-defined]
                if what < 0.2 and known is not None and known.overlap(*place[:2]):
                    # A restarted broker does not know which rows a consumer may return.
                    self.done.discard(row.sequence)
                    self.node.nack(consumer, place, counted=False)
            elif what < 0.6:
                assert self.node.ack(consumer, place)
                self.done.add(row.sequence)
            elif what < 0.7:
                assert self.node.nack(consumer, place, reject=True)
            elif what < 0.85:
                assert self.node.nack(consumer, place, delay=self.draw.choice((0.0, 1.0, None)))
            else:
                assert self.node.nack(consumer, place, counted=False)

    def change(self) -> None:
        """Change the filter: members attach again."""
        if self.plain:
            return
        self.wanted, self.version = self.draw.choice(WANTED), self.version + 1
        terms = tag_filter(self.wanted, self.draw.randrange(3))
        set_group_filter(self.node.broker, self.group, GroupFilter(terms, version=self.version))
        self.node.turn()

    def leave(self) -> None:
        consumer = self.consumer()
        self.held[consumer.client].clear()
        self.node.membership.detach(consumer)
        self.node.turn()

    def time(self) -> None:
        self.node.later(self.draw.choice((0.1, 2.0, 6.0)))
        for consumer, _ in self.node.membership.lose_silent():
            self.held[consumer.client].clear()
        self.node.turn()

    def reset(self) -> None:
        sequence = self.draw.randrange(self.group.partition.start, len(self.tags) + 1)
        self.group.rewind(sequence, skipping=self.draw.random() < 0.5)
        self.node.turn()
        for held in self.held.values():
            held.clear()
        for rows in (self.done, self.left):
            rows -= {row for row in rows if row >= sequence}
        self.delivered -= {row for row in self.delivered if row >= sequence}
        self.lost_below = max(self.lost_below, sequence)

    def expire(self) -> None:
        """Retention deletes rows: those that were begun are kept for the group."""
        for _ in range(KEEP):
            self.node.checkpoint()
        self.node.clock.advance(RETENTION)
        for _ in range(2):
            self.node.retention.run()
            self.node.turn()
            self.node.sync()
        self.lost_below = max(self.lost_below, self.node.partition(SUBJECT).start)

    def crash(self) -> None:
        how = self.draw.choice(("killed", "power_lost", "restart", "fallen_back"))
        if how == "power_lost" and self.node.config.flush == "async":
            self.node.sync()
        self.node = getattr(self.node, how)()
        # A consumer keeps the rows that it holds when it attaches again in time.
        for client in sorted(self.held):
            if self.kind == "broadcast" or self.draw.random() < 0.5:
                self.attach(client)
            else:
                self.held[client].clear()

    def checkpoint(self) -> None:
        for _ in range(self.draw.randrange(1, 5)):
            self.node.checkpoint_step()

    def run(self, steps: int) -> None:
        often = [self.send, self.pull, self.pull, self.finish, self.finish]
        seldom = [self.change, self.leave, self.time, self.crash, self.checkpoint]
        rare = [self.reset, self.expire]
        for _ in range(steps):
            [kinds] = self.draw.choices((often, seldom, rare), (0.75, 0.21, 0.04))
            self.draw.choice(kinds)()
            self.look()
        self.drain()

    def drain(self) -> None:
        for _ in range(500):
            self.node.later(60.0)
            self.pull()
            for client, held in self.held.items():
                consumer = self.group.consumers.get(client)
                for row in list(held.values()) if consumer is not None and self.kind != "at_most_once" else ():
                    assert consumer is not None
                    self.node.ack(consumer, (row.sequence, row.sequence + 1, row.epoch))
                    self.done.add(row.sequence)
                held.clear()
            if self.group.floor == len(self.tags):
                break
        self.look()
        shown = group_view(self.group, counted=True)
        assert (shown.floor, shown.lag) == (len(self.tags), 0)
        dead = self.group.failures.dead
        for sequence in range(self.lost_below, len(self.tags)):
            assert sequence in self.left | self.done or dead.overlap(sequence, sequence + 1), f"{sequence} is lost"


def passed_by(cursor: Cursor, sequence: int) -> bool:
    """Whether a row of the cursor is neither to be delivered nor begun."""
    known = cursor.begun(sequence, sequence + 1) or (cursor.passed and cursor.passed.overlap(sequence, sequence + 1))
    return sequence < cursor.next and not known


@contextmanager
def limited_examinations(seed: int) -> Iterator[None]:
    """In half of the runs, one turn examines few frames; in a quarter, few rows of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan_budget, "FILTER_SCAN_FRAMES", 2 if seed % 2 else FILTER_SCAN_FRAMES)
        patch.setattr(message_filter, "FILTER_PART_COUNT", 3 if seed % 4 == 1 else FILTER_PART_COUNT)
        # A compiled filter keeps its limits.
        compile_filter.cache_clear()
        try:
            yield
        finally:
            compile_filter.cache_clear()


@pytest.mark.parametrize("kind", ["at_least_once", "at_most_once", "broadcast"])
def test_shared_groups_leave_out_exactly_what_does_not_match(kind: str):
    for seed in range(40):
        with limited_examinations(seed), within_cpu_seconds(20.0):
            SharedModel(seed, kind).run(60)


# --- ordered groups -------------------------------------------------------------------------------


class FilteredWorld(World):
    """The model of ordered groups, with messages that filters leave out. ``sent`` has those with the tag ``a``."""

    def __init__(self, seed: int, flush: str) -> None:
        super().__init__(seed, flush)
        self.choice = random.Random(f"{seed} filters")
        self.addresses = random.Random(f"{seed} addresses")
        self.wanted = self.choice.choice(WANTED)
        self.version = 1
        #: Body → sequence, tag and key.
        self.placed: dict[bytes, tuple[int, str, str]] = {}
        self.left: set[bytes] = set()
        self.hashes: dict[str, int] = {}
        #: Messages without the tag ``a`` that were handled.
        self.others_done: set[bytes] = set()
        # Members without a filter use that of the first member.
        wanted = GroupFilter(tag_filter(self.wanted, self.choice.randrange(3)), stated=True)
        first = self.node.attach(SUBJECT, GROUP, "first", ordered=True, retry=RETRY, wanted=wanted)
        self.node.membership.detach(first)
        self.node.turn()

    def send(self) -> None:
        rows = []
        for _ in range(self.rng.randrange(1, SENT_MAX + 1)):
            self.number += 1
            rows.append((self.rng.choice(self.keys), b"%d" % self.number + bytes(self.rng.choice((0, 0, 300)))))
        tags, keys = self.choice.choices(TAGS, k=len(rows)), [key for key, _ in rows]
        frame = self.producer.frame(
            SUBJECT,
            *(body for _, body in rows),
            keys=keys,
            key_hashes=hash_keys(keys, len(keys)),
            **columns_of(tags, self.addresses, GROUP, plain=False),
        )
        sent = self.node.submit(frame)
        self.node.turn()
        assert sent.sequence is not None
        for number, ((key, body), tag) in enumerate(zip(rows, tags, strict=True)):
            self.placed[body] = sent.sequence + number, tag, key
            if tag == "a":
                self.sent[key].append(body)

    def pull(self, name: str) -> None:
        owner = self.owners[name]
        before = len(owner.rows)
        super().pull(name)
        for row in owner.rows[before:]:
            tag = self.placed[row.body][1]
            assert row.attempt > 1 or tag in self.wanted, f"{row.body!r} has {tag} and does not match {self.wanted}"
            assert row.body not in self.left, f"{row.body!r} was left out and is delivered"

    def handled(self, row: Held) -> None:
        if self.placed[row.body][1] == "a":
            super().handled(row)
            return
        assert row.body not in self.certain, f"{row.body!r} was acked and is handled again"
        self.others_done.add(row.body)

    def look(self) -> None:
        """Find rows that were left out: they are done, and no owner has handled them."""
        cursors = self.node.group(SUBJECT, GROUP).cursors
        for body, (sequence, tag, key) in self.placed.items():
            known = self.hashes.get(key)
            if known is None:
                known = self.hashes[key] = int(hash_keys([key], 1)[0])
            if passed_by(cursors.for_row(known % LPS, known), sequence):
                if tag == "a":
                    assert body in self.done[key], f"{body!r} of {key} matches every filter and was left out"
                elif body not in self.others_done:
                    self.left.add(body)

    def crash(self, how: Crash) -> None:
        self.look()
        super().crash(how)
        self.look()

    def step(self) -> None:
        super().step()
        if self.choice.random() < 0.03:
            self.crash("killed")
        if self.choice.random() < 0.03:
            self.wanted, self.version = self.choice.choice(WANTED), self.version + 1
            wanted = GroupFilter(tag_filter(self.wanted, self.choice.randrange(3)), version=self.version)
            set_group_filter(self.node.broker, self.node.group(SUBJECT, GROUP), wanted)
            self.node.turn()

    def check_counts(self) -> None:
        shown = group_view(self.node.group(SUBJECT, GROUP), counted=True)
        assert shown.lost == 0, f"{shown.lost} rows are counted as lost"


@pytest.mark.parametrize("flush", ["async", "sync"])
def test_ordered_groups_leave_out_exactly_what_does_not_match(flush: str):
    for seed in range(40):
        with limited_examinations(seed):
            FilteredWorld(seed, flush).run(80)
