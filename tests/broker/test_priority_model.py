"""Model of priorities and fairness: random sends, pulls, outcomes, crashes, checkpoints, retention, rewinds, filters.

Each message has a priority and a tenant; ``x`` messages are left out by the filter of some runs. The model knows which
rows no consumer has begun. Every pull must give due retries first, then rows of the highest priority, then of lower
ones, in equal shares of the tenants, except for the share of the lower priorities. In the end every message is done.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from plait.broker.groups import look_ahead
from plait.broker.groups.group import AttachedConsumer
from plait.broker.groups.group_settings import GroupFilter
from plait.broker.groups.shared_group import SharedGroup
from plait.broker.views import group_view
from plait.client.send.encoding import encode_headers, encode_tags, priorities_of
from plait.client.send.open_rows import hash_keys
from plait.filter import scan_budget
from plait.limits import FILTER_SCAN_FRAMES, LOOK_AHEAD_RUNS_MAX, PRIORITY_SHARE
from plait.model.filter_terms import FilterTerms, TagFilter
from plait.model.retry_policy import Retry
from plait.storage.checkpoint import KEEP
from tests.broker.ordered_node import GROUP, SUBJECT
from tests.broker.ordered_world import RETENTION
from tests.support.broker_node import Node, Producer, Row
from tests.support.progress import within_cpu_seconds

TENANTS = ("a", "b", "c", "d", "")
CLIENTS = ("c1", "c2")
#: The most rows of a pull.
PULL_MAX = 100


class PriorityModel:
    """A broker with one shared group. ``sees_all``: each pull examines all rows, so the order can be asserted."""

    def __init__(self, seed: int, *, sees_all: bool = True) -> None:
        draw = self.draw = random.Random(f"{seed} priorities")
        self.sees_all = sees_all
        self.delivery = draw.choice(("at_least_once", "at_least_once", "at_most_once"))
        self.fair_by = draw.choice((None, None, "key", "tenant"))
        self.filtered = draw.random() < 0.3
        self.node = Node(
            flush=draw.choice(("sync", "async")),
            retention_seconds=RETENTION,
            message_segment_size=draw.choice((2048, 65536)),
        )
        self.producer = Producer(7)
        self.ranks: list[int] = []
        self.tenants: list[str] = []
        self.out: set[int] = set()
        self.fresh: set[int] = set()
        self.held: dict[str, dict[int, Row]] = {client: {} for client in CLIENTS}
        self.done: set[int] = set()
        self.lost_below = 0
        #: Rows of the highest priority since the last lower one, while lower ones waited.
        self.streak = 0
        #: Priority → tenant → rows that it got since it began to wait.
        self.shares: dict[int, Counter[str]] = {}
        self.send()
        self.attach("c1")

    @property
    def group(self) -> SharedGroup:
        [group] = self.node.partition(SUBJECT).groups.values()
        assert isinstance(group, SharedGroup)
        return group

    @property
    def once(self) -> bool:
        return self.delivery == "at_most_once"

    # --- steps ----------------------------------------------------------------------------------

    def attach(self, client: str) -> AttachedConsumer:
        wanted = FilterTerms(TagFilter(none=("x",))) if self.filtered else None
        return self.node.attach(
            SUBJECT,
            GROUP,
            client,
            wanted=GroupFilter(wanted, version=1),
            delivery=self.delivery,
            holds=[(row.sequence, row.sequence + 1, row.epoch) for row in self.held[client].values()],
            start="earliest",
            retry=Retry(first=1.0),
            fair_by=self.fair_by,
        )

    def consumer(self) -> AttachedConsumer:
        client = self.draw.choice(CLIENTS)
        known = self.group.consumers.get(client)
        if known is None or not known.connected:
            known = self.attach(client)
        self.node.contact(known)
        return known

    def send(self) -> None:
        draw, count = self.draw, self.draw.choice((1, 1, 3, 40))
        how = draw.random()
        ranks = [0 if how < 0.3 else draw.choice((0, 0, 1, 5, 9)) for _ in range(count)]
        if how > 0.8:
            ranks = [ranks[0]] * count
        tenants = [draw.choice(TENANTS)] * count if draw.random() < 0.5 else draw.choices(TENANTS, k=count)
        out = [draw.random() < 0.2 for _ in range(count)]
        first = len(self.ranks)
        one = ranks[0] if len(set(ranks)) == 1 and draw.random() < 0.5 else ranks
        frame = self.producer.frame(
            SUBJECT,
            *(b"%d" % (first + number) for number in range(count)),
            keys=tenants,
            key_hashes=hash_keys(tenants, count),
            headers=[encode_headers({"tenant": tenant} if tenant else {"other": 1}) for tenant in tenants],
            tags=[encode_tags(["x"] if each else ["y"]) for each in out],
            priority=priorities_of(one, count),
        )
        self.node.submit(frame)
        self.node.turn()
        self.fresh |= set(range(first, first + count))
        self.ranks += ranks
        self.tenants += tenants
        if self.filtered:
            self.out |= {first + number for number, each in enumerate(out) if each}

    def pull(self) -> None:
        consumer = self.consumer()
        count = self.draw.choice((1, 5, 20, PULL_MAX))
        wanted = self.fresh - self.out
        pulled = self.node.pull(consumer, count, self.draw.choice((1, 400, 1 << 20, 1 << 20)))
        attempts = {row: attempt for start, end, attempt in pulled.ranges for row in range(start, end)}
        rows = pulled.rows
        assert sorted(attempts) == sorted(row.sequence for row in rows)
        new = []
        for row in rows:
            sequence = row.sequence
            assert row.body == b"%d" % sequence
            assert sequence not in self.done, f"{sequence} was done and is delivered again"
            assert not any(sequence in held for held in self.held.values()), f"{sequence} is held by a consumer"
            if attempts[sequence] == 1:
                assert sequence in wanted, f"{sequence} was begun before, or left out"
                new.append(sequence)
            if self.once:
                self.done.add(sequence)
            else:
                self.held[consumer.client][sequence] = row
        if self.sees_all:
            self.check_order(new, wanted)
            if not rows and wanted and not self.group.at_limit(consumer):
                raise AssertionError(f"{len(wanted)} rows wait and none is delivered")
        self.fresh -= set(new)

    def check_order(self, new: list[int], wanted: set[int]) -> None:
        """Rows of the highest priority come first, except for the share of the lower ones, which they get."""
        if not new:
            return
        top = max(self.ranks[sequence] for sequence in wanted)
        high = [sequence for sequence in new if self.ranks[sequence] == top]
        lower, waiting = len(new) - len(high), {s for s in wanted if self.ranks[s] == top} - set(high)
        if waiting:
            # The group counts rows that its filter left out too.
            allowed = (self.streak + 2 * PRIORITY_SHARE) // (PRIORITY_SHARE - 1) + 6 * self.filtered
            assert lower <= allowed, f"{lower} rows overtook {len(waiting)} of priority {top}"
        if any(self.ranks[sequence] < top for sequence in wanted):
            assert lower or self.streak < 2 * PRIORITY_SHARE, f"{self.streak} rows overtook lower ones: they starve"
            self.streak = max(self.streak + len(high) - (PRIORITY_SHARE - 1) * lower, 0)
        else:
            self.streak = 0
        if self.fair_by is not None and not self.filtered:
            self.check_shares(top, high, waiting)

    def check_shares(self, top: int, high: list[int], waiting: set[int]) -> None:
        """The tenants that wait got about equal numbers of rows since they began to wait."""
        shares = self.shares.setdefault(top, Counter())
        shares.update(self.tenants[sequence] for sequence in high)
        left = {self.tenants[sequence] for sequence in waiting}
        for tenant in [each for each in shares if each not in left]:
            del shares[tenant]
        known = [shares[tenant] for tenant in left if tenant in shares]
        for tenant in left - shares.keys():
            shares[tenant] = min(known, default=0)
        assert max(shares.values(), default=0) - min(shares.values(), default=0) <= 2 * PULL_MAX, f"unfair: {shares}"

    def finish(self) -> None:
        """Ack, fail, reject or return some rows that a consumer holds."""
        consumer = self.consumer()
        held = self.held[consumer.client]
        for row in self.draw.sample(sorted(held.values()), min(len(held), self.draw.randrange(1, 40))):
            del held[row.sequence]
            place, what = (row.sequence, row.sequence + 1, row.epoch), self.draw.random()
            if what < 0.6:
                assert self.node.ack(consumer, place)
                self.done.add(row.sequence)
            elif what < 0.7:
                assert self.node.nack(consumer, place, reject=True)
                self.done.add(row.sequence)
            elif what < 0.85:
                assert self.node.nack(consumer, place, delay=self.draw.choice((0.0, 1.0, None)))
            else:
                attempt = [r.attempt for r in self.group.cursor.begun(*place[:2])]
                assert self.node.nack(consumer, place, counted=False)
                if attempt == [1]:
                    self.fresh.add(row.sequence)

    def forget(self) -> None:
        """The group looks ahead from the beginning: it does not know whose turn it was."""
        self.streak = 0
        self.shares.clear()

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

    def rewind(self) -> None:
        sequence = self.draw.randrange(self.group.partition.start, len(self.ranks) + 1)
        skipping = self.draw.random() < 0.5
        self.group.rewind(sequence, skipping=skipping)
        self.node.turn()
        for held in self.held.values():
            held.clear()
        again = set(range(sequence, len(self.ranks)))
        self.done -= again
        self.fresh |= again
        self.forget()
        if skipping:
            self.fresh = again
            self.lost_below = max(self.lost_below, sequence)

    def expire(self) -> None:
        """Retention deletes rows: those that were begun are kept for the group, the others are lost."""
        for _ in range(KEEP):
            self.node.checkpoint()
        self.node.clock.advance(RETENTION)
        for _ in range(2):
            self.node.retention.run()
            self.node.turn()
            self.node.sync()
        start = self.node.partition(SUBJECT).start
        retained = self.group.retained.offsets
        assert not [s for s in self.fresh if s in retained], "a row that was not begun is retained"
        self.lost_below = max(self.lost_below, start)
        self.fresh = {sequence for sequence in self.fresh if sequence >= start}
        self.forget()

    def crash(self) -> None:
        how = self.draw.choice(("killed", "power_lost", "restart"))
        if how == "power_lost" and self.node.config.flush == "async":
            self.node.sync()
        self.node = getattr(self.node, how)()
        self.forget()
        for client in CLIENTS:
            if self.draw.random() < 0.5:
                self.attach(client)
            else:
                self.held[client].clear()

    def checkpoint(self) -> None:
        for _ in range(self.draw.randrange(1, 5)):
            self.node.checkpoint_step()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.drain()

    def step(self) -> None:
        often = [self.send, self.pull, self.pull, self.finish, self.finish]
        seldom = [self.leave, self.time, self.crash, self.checkpoint]
        [kinds] = self.draw.choices((often, seldom, [self.rewind, self.expire]), (0.8, 0.15, 0.05))
        self.draw.choice(kinds)()
        self.check_counts()

    def check_counts(self) -> None:
        cursor, look = self.group.cursor, self.group.ranked
        begun = {row for held in self.held.values() for row in held}
        assert not begun & {row for start, end, _ in cursor.passed for row in range(start, end)}
        if look is not None:
            assert look._look.runs <= look_ahead.LOOK_AHEAD_RUNS_MAX + 8

    def drain(self) -> None:
        for _ in range(1000):
            self.node.later(60.0)
            self.pull()
            for client, held in self.held.items():
                consumer = self.group.consumers.get(client)
                for row in list(held.values()) if consumer is not None else ():
                    assert consumer is not None
                    self.node.ack(consumer, (row.sequence, row.sequence + 1, row.epoch))
                    self.done.add(row.sequence)
                held.clear()
            if self.group.floor == len(self.ranks):
                break
        shown = group_view(self.group)
        assert (shown.floor, shown.lag) == (len(self.ranks), 0)
        dead = self.group.failures.dead
        for sequence in range(self.lost_below, len(self.ranks)):
            known = sequence in self.done | self.out or dead.overlap(sequence, sequence + 1)
            assert known, f"{sequence} is lost"


def test_priorities_and_fairness_keep_their_promises():
    for seed in range(170):
        with within_cpu_seconds(20.0):
            PriorityModel(seed).run(50)


def test_nothing_is_lost_while_a_group_looks_ahead_in_small_steps(monkeypatch: pytest.MonkeyPatch):
    for seed in range(1000, 1060):
        # The look-ahead has room for few runs, and a turn examines few frames.
        runs = 20 if seed % 2 else LOOK_AHEAD_RUNS_MAX
        monkeypatch.setattr(look_ahead, "LOOK_AHEAD_RUNS_MAX", runs)
        monkeypatch.setattr(look_ahead, "LOOK_AHEAD_RUNS_LOW", runs // 2)
        monkeypatch.setattr(look_ahead, "LOOK_AHEAD_ROWS", 7)
        monkeypatch.setattr(look_ahead, "LOOK_AHEAD_RECORDS", 3)
        monkeypatch.setattr(scan_budget, "FILTER_SCAN_FRAMES", 2 if seed % 3 else FILTER_SCAN_FRAMES)
        with within_cpu_seconds(20.0):
            PriorityModel(seed, sees_all=False).run(50)
