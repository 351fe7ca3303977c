"""A model of ordered groups with all faults at once: owners join, leave and outlast their leases, brokers crash.

Retention deletes acked rows, and copies rows that are in flight or wait for a retry; some starts use an older
checkpoint.

Owners follow the rules of a client (``ordered_node``). In every run, the messages of a key of the strict subject are
first handled in the order in which they were sent; a row whose ack was answered is not handled again; and in the end
every row is handled.
"""

from __future__ import annotations

import random
from collections import defaultdict
from contextlib import suppress
from typing import Literal

from plait.broker.views import group_view
from plait.errors import GroupBusy, InvalidArgument, LimitExceeded
from plait.limits import ServerLimits
from plait.model.rate import Rate
from plait.model.retry_policy import Retry
from plait.model.settings import with_pause, with_rate
from plait.storage.checkpoint import KEEP
from tests.broker.ordered_node import GROUP, NEWEST, SUBJECT, Held, Owner, keyed, make_subject
from tests.broker.rate_record import RateRecord
from tests.support.broker_node import Node, Producer
from tests.support.progress import within_cpu_seconds

LPS = 1024
RETRY = Retry(first=1.0, factor=2.0, jitter=0.0, attempts=None)
HOSTILE: list[tuple[list[tuple[int, int, int, int]], list[int], list[int]]] = [
    ([(0, LPS, 2**62 - 1, 0)], [], []),
    ([(0, LPS, 2**40, 0)], [], []),
    ([(0, LPS, 0, 0)], [], []),
    ([(0, 1, 1, 0)] * (LPS + 1), [], []),
    ([(0, 1, 1, 0)], [-1], []),
    ([(0, LPS, 1, -1)], [], []),
    # Hashes of keys that are not in the requested LPs.
    ([(0, 1, 1, 0)], [2**64 - 1, 2**63 + 5], [5]),
    ([], [], [-1]),
]
RETENTION = 5.0
#: Rows whose keys are remembered, and the most rows of one send.
KEY_ROWS, SENT_MAX = 40, 11
Crash = Literal["killed", "power_lost", "restart", "fallen_back"]


class World:
    """A broker, its owners, and the rows that they handled."""

    def __init__(self, seed: int, flush: str, *, expires: bool = True) -> None:
        #: Whether retention runs.
        self._expires = expires
        self.rng = random.Random(seed)
        #: Draws the newer features, so that the rest of a seed's run changes less. Some runs have no rewind.
        self.later = random.Random(f"{seed} later")
        self.rewinding = self.later.choice((0.0, 0.01, 0.03))
        self.paused = False
        #: Draws the limits of the group. Some runs have none.
        self.limiting = random.Random(f"{seed} rates")
        self.rates = self.limiting.choice(((None,), (None, 20.0, 200.0)))
        self.rate = RateRecord()
        limits = ServerLimits(
            consumer_ranges=self.rng.choice((3, 10_000)),
            held_keys=random.Random(seed).choice((3, 10_000)),
            key_rows=KEY_ROWS,
        )
        self.node = Node(
            flush=flush,
            message_segment_size=self.rng.choice((2048, 2048, 65536)),
            action_segment_size=16384,
            limits=limits,
            retention_seconds=RETENTION,
        )
        make_subject(self.node)
        self.node.turn()
        self.producer = Producer(7)
        self.owners: dict[str, Owner] = {}
        self.silent: set[str] = set()
        #: Processes whose client ids other processes use now.
        self.zombies: list[Owner] = []
        self.names = 0
        self.epoch = 0
        self.allocation = [""] * LPS
        self.epochs = [0] * LPS
        self.keys = [f"k{number}" for number in range(self.rng.choice((3, 12, 60)))]
        self.sent: dict[str, list[bytes]] = defaultdict(list)
        #: The key and body of each row, by sequence.
        self.rows: list[tuple[str, bytes]] = []
        self.done: dict[str, list[bytes]] = defaultdict(list)
        #: Bodies of rows whose ack is certainly recorded.
        self.certain: set[bytes] = set()
        self.number = 0
        self.failing = 0.1
        #: The key of a slow message.
        self.slow = ""

    def attached(self, owner: Owner) -> bool:
        return self.node.broker.sessions.get(owner.consumer.session) is owner.consumer

    # --- steps ----------------------------------------------------------------------------------

    def send(self) -> None:
        rows = []
        for _ in range(self.rng.randrange(1, SENT_MAX + 1)):
            self.number += 1
            # Some rows are so large that a small pull gets only one.
            rows.append((self.rng.choice(self.keys), b"%d" % self.number + bytes(self.rng.choice((0, 0, 300)))))
        keyed(self.node, self.producer, rows)
        self.rows += rows
        for key, body in rows:
            self.sent[key].append(body)

    def join(self) -> None:
        if len(self.owners) < 5:
            self.names += 1
            name = f"c{self.names}"
            self.owners[name] = Owner(self.node, name, retry=RETRY)
            self.allocate()

    def succeed(self) -> None:
        """Start another process with the client id of one that lost its connection and still handles its rows."""
        if self.owners:
            name = self.rng.choice(sorted(self.owners))
            before = self.owners[name]
            if self.attached(before):
                self.node.membership.disconnected(before.consumer, before.consumer.session)
            self.zombies.append(before)
            self.silent.discard(name)
            self.owners[name] = Owner(self.node, name, retry=RETRY)

    def leave(self) -> None:
        if self.owners:
            name = self.rng.choice(sorted(self.owners))
            owner = self.owners.pop(name)
            self.silent.discard(name)
            if self.attached(owner):
                owner.give_back(list(owner.rows))
                self.node.membership.detach(owner.consumer)
                self.node.turn()
            self.allocate()

    def kill_owner(self) -> None:
        """Kill an owner: it does not detach, and its lease expires."""
        if self.owners:
            name = self.rng.choice(sorted(self.owners))
            del self.owners[name]
            self.silent.discard(name)
            self.allocate()

    def pause(self) -> None:
        if self.owners:
            self.silent.add(self.rng.choice(sorted(self.owners)))

    def resume(self) -> None:
        if self.silent:
            self.silent.discard(self.rng.choice(sorted(self.silent)))

    def allocate(self) -> None:
        """Allocate like the meta server: sticky, and moved LPs get the next epoch."""
        self.epoch += 1
        names = sorted(self.owners)
        for lp in range(LPS):
            name = names[lp * len(names) // LPS] if names else ""
            keep = self.allocation[lp] in self.owners and self.rng.random() < 0.5
            if self.allocation[lp] != name and not keep:
                self.allocation[lp], self.epochs[lp] = name, self.epoch

    def wants(self, name: str) -> list[tuple[int, int, int]]:
        runs: list[tuple[int, int, int]] = []
        for lp in range(LPS):
            if self.allocation[lp] == name:
                if runs and runs[-1][1:] == (lp, self.epochs[lp]):
                    runs[-1] = (runs[-1][0], lp + 1, self.epochs[lp])
                else:
                    runs.append((lp, lp + 1, self.epochs[lp]))
        return runs

    def lease(self, name: str) -> None:
        owner = self.owners[name]
        if not self.attached(owner):
            # The broker lost it while it was silent: other owners get its rows.
            owner.rows, owner.rights = [], {}
            owner.attach()
        owner.by_lps = self.rng.random() < 0.7
        owner.reaches = self.rng.random() < 0.5
        owner.lease(self.wants(name))

    def pull(self, name: str) -> None:
        owner = self.owners[name]
        if self.attached(owner):
            pulled = owner.pull(self.rng.choice((1, 5, 100)), self.rng.choice((1, 400, 1 << 20)))
            assert not (pulled and self.paused), f"the paused group delivered {len(pulled)} rows"
            self.rate.delivered(len(pulled), self.node.clock.monotonic())

    def ready(self, owner: Owner) -> list[Held]:
        """The rows that an owner may handle, except for the slow message."""
        return [row for row in owner.ready() if row.key != self.slow]

    def handle(self, name: str) -> None:
        owner = self.owners[name]
        if not self.attached(owner):
            return
        for row in self.rng.sample(ready := self.ready(owner), min(len(ready), self.rng.randrange(1, 6))):
            if row not in owner.rows:
                continue
            self.alone(owner, row)
            if self.rng.random() < self.failing:
                owner.nack(row, None)
            else:
                self.handled(row)
                if owner.ack(row):
                    self.certain.add(row.body)

    def alone(self, owner: Owner, row: Held) -> None:
        """Check that no other process handles the key (R14): none has a valid lock of the LP and a row of the key."""
        for other in [*self.owners.values(), *self.zombies]:
            if other is not owner and other.valid and row.lp in other.rights:
                assert row.key not in {held.key for held in other.rows}, f"two processes handle {row.key}"

    def handled(self, row: Held) -> None:
        key, done = row.key, self.done[row.key]
        assert row.body not in self.certain, f"{row.body!r} was acked and is handled again"
        if row.body in done:
            # A redelivery, because the ack was not recorded.
            return
        assert row.body == self.sent[key][len(done)], f"{key}: {row.body!r} was handled after {done[-3:]!r}"
        done.append(row.body)

    def hostile(self) -> None:
        """A member sends an invalid request. Whatever the answer, other members must not be affected."""
        name = f"hostile{self.rng.randrange(2)}"
        consumer = self.node.attach(SUBJECT, GROUP, name, ordered=True, retry=RETRY)
        wants, parked, resumed = self.rng.choice(HOSTILE)
        with suppress(InvalidArgument, LimitExceeded):
            self.node.broker.leases.ask(consumer, wants, parked, resumed, NEWEST)
        self.node.turn()
        self.node.membership.disconnected(consumer, consumer.session)

    def crash(self, how: Crash) -> None:
        if how == "power_lost":
            # With flush=async, answered acks that are not synced may be lost.
            if self.node.config.flush == "async":
                self.node.sync()
            self.node = self.node.power_lost()
        else:
            self.node = getattr(self.node, how)()
        self.rate.restarted(self.node.clock.monotonic())
        for name, owner in self.owners.items():
            owner.node = self.node
            if name not in self.silent:
                owner.attach()

    def expire(self) -> None:
        """Run retention after every row was delivered: it deletes no row that a key still needs."""
        if not self._expires:
            return
        for _ in range(30):
            visible = self.node.partition(SUBJECT).visible
            cursors = self.node.group(SUBJECT, GROUP).cursors
            if all(cursor.next == visible for cursor in cursors if cursor.key is None):
                break
            self.heal()
        else:
            return
        for _ in range(KEEP):
            self.node.checkpoint()
        self.node.clock.advance(RETENTION)
        for _ in range(2):
            # The copies of the first run are durable in the second.
            self.node.retention.run()
            self.node.turn()
            self.node.sync()
        if self.rng.random() < 0.5:
            self.crash(self.rng.choice(("killed", "power_lost", "fallen_back")))

    def pause_group(self, *, paused: bool) -> None:
        settings = self.node.partition(SUBJECT).row.settings
        self.node.broker.catalog.update_subject(SUBJECT, with_pause(settings, GROUP, self.node.clock.now() * paused))
        self.node.turn()
        self.paused = paused

    def limit_group(self, messages: float | None) -> None:
        settings = self.node.partition(SUBJECT).row.settings
        self.node.broker.catalog.update_subject(SUBJECT, with_rate(settings, GROUP, Rate(messages)))
        self.node.turn()
        self.rate.begin(messages, self.node.clock.monotonic())

    def rewind(self) -> None:
        """Stop all owners, some without detaching, and rewind the group as soon as no lease runs."""
        names = self.node.partition(SUBJECT).groups
        if not self.rows or GROUP not in names:
            return
        for name, owner in sorted(self.owners.items()):
            if name not in self.silent and self.attached(owner):
                self.node.membership.detach(owner.consumer)
                continue
            # It has lost its connection, and may still handle its rows.
            self.zombies.append(owner)
            if self.attached(owner):
                self.node.membership.disconnected(owner.consumer, owner.consumer.session)
        self.owners.clear()
        self.silent.clear()
        self.node.turn()
        to = self.later.randrange(len(self.rows) + 1)
        skipping = self.later.random() < 0.3
        try:
            found = self.node.membership.rewind(SUBJECT, GROUP, ["sequence", to], skipping=skipping)
        except GroupBusy:
            return
        self.node.turn()
        self._rewound(found.position, skipping=skipping)

    def _rewound(self, to: int, *, skipping: bool) -> None:
        """Every row from ``to`` on may be handled again, in order; skipped rows never are."""
        again = {body for _, body in self.rows[to:]}
        self.certain -= again
        for key, done in self.done.items():
            self.done[key] = [body for body in done if body not in again]
        if skipping:
            for key, body in self.rows[:to]:
                self.certain.add(body)
                if body not in self.done[key]:
                    self.done[key].append(body)

    def step(self) -> None:
        step = self.rng.random()
        if step < 0.15:
            self.send()
        elif step < 0.18:
            self.join()
        elif step < 0.195:
            self.leave()
        elif step < 0.205:
            self.kill_owner()
        elif step < 0.22:
            self.pause()
        elif step < 0.24:
            self.resume()
        elif step < 0.25:
            self.allocate()
        elif step < 0.26:
            self.crash(self.rng.choice(("killed", "power_lost", "restart", "fallen_back")))
        elif step < 0.265:
            self.node.checkpoint()
        elif step < 0.27:
            for _ in range(self.rng.randrange(1, 5)):
                self.node.checkpoint_step()
        elif step < 0.28:
            self.expire()
        elif step < 0.3:
            self.hostile()
        elif step < 0.31:
            self.succeed()
        elif step < 0.39:
            self.node.later(self.rng.choice((0.1, 1.0, 4.0, 11.0)))
            self.node.membership.lose_silent()
            self.node.broker.leases.look()
            self.node.turn()
        else:
            awake = sorted(self.owners.keys() - self.silent)
            if awake:
                name = self.rng.choice(awake)
                self.rng.choice((self.lease, self.pull, self.handle))(name)

    def check_memory(self) -> None:
        rows = self.node.broker.catalog.known_rows.rows
        assert rows <= KEY_ROWS + SENT_MAX, f"the keys of {rows} rows are cached"

    def check_counts(self) -> None:
        """Check the lag, unless it is an estimate, and that retention deleted no open row."""
        shown = group_view(self.node.group(SUBJECT, GROUP), counted=True)
        assert shown.lost == 0, f"{shown.lost} rows are counted as lost"
        if not shown.estimated:
            sent = sum(map(len, self.sent.values()))
            handled = sum(map(len, self.done.values()))
            # An unanswered ack may or may not be recorded.
            assert sent - handled <= shown.lag <= sent - len(self.certain), (
                f"a lag of {shown.lag}, with {handled} of {sent} rows handled and {len(self.certain)} certainly acked"
            )

    def heal(self) -> None:
        """Wake every owner; each pulls and handles a few rows."""
        self.silent.clear()
        if not self.owners:
            self.join()
        self.node.later(0.5)
        self.node.membership.lose_silent()
        self.node.broker.leases.look()
        self.node.turn()
        for name in sorted(self.owners):
            self.lease(name)
            self.pull(name)
            self.handle(name)

    def handle_beside_a_slow_one(self) -> None:
        """Keep one message in flight. Meanwhile other keys fail and recover, and all of their messages are handled."""
        limits = self.node.config.limits
        rows = [row for owner in self.owners.values() for row in owner.ready()]
        if not rows or len(self.keys) < 12 or limits.consumer_ranges < 10_000:
            return
        self.slow, self.failing = min(rows).key, 0.3
        # Rows that failed often wait for minutes.
        for number in range(1000):
            if number < 10:
                self.send()
            else:
                self.failing = 0.0
            self.heal()
            for name in sorted(self.owners):
                while number >= 10 and self.ready(self.owners[name]):
                    self.handle(name)
            if number > 10 and all(self.done[key] == self.sent[key] for key in self.sent if key != self.slow):
                break
        else:
            raise AssertionError(f"while {self.slow} is in flight, other keys are not delivered")
        self.slow = ""

    def drain(self) -> None:
        """End all faults, the pause and a low limit: every row is handled."""
        self.pause_group(paused=False)
        self.limit_group(None if self.rate.messages is None else 1000.0)
        self.failing = 0.0
        self.zombies.clear()
        self.heal()
        self.handle_beside_a_slow_one()
        for _ in range(400):
            self.heal()
            for name in sorted(self.owners):
                while self.ready(self.owners[name]):
                    self.handle(name)
            if self.node.group(SUBJECT, GROUP).floor == self.node.partition(SUBJECT).visible:
                break
        assert {key: self.done[key] for key in self.sent} == self.sent

    def run(self, steps: int, cpu_seconds: float = 30.0) -> None:
        """Run the model. It takes a second at most; an endless loop in the broker fails instead of hanging."""
        with within_cpu_seconds(cpu_seconds):
            self._run(steps)

    def _run(self, steps: int) -> None:
        self.join()
        for number in range(steps):
            if self.later.random() < self.rewinding:
                self.rewind()
            if self.later.random() < (0.05 if self.paused else self.rewinding):
                self.pause_group(paused=not self.paused)
                if self.later.random() < 0.3:
                    self.crash(self.later.choice(("killed", "power_lost", "restart", "fallen_back")))
            if self.limiting.random() < 0.03:
                self.limit_group(self.limiting.choice(self.rates))
            self.step()
            self.check_memory()
            if number % 10 == 0:
                self.check_counts()
        self.drain()
        self.check_counts()
        group = self.node.group(SUBJECT, GROUP)
        assert group.floor == self.node.partition(SUBJECT).visible
