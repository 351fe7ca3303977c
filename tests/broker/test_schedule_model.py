"""The schedule compared with a simple model of each message, with crashes between any two steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from plait.broker.recovery import checkpointer as snapshot
from plait.broker.schedule import delayed_requests, upcoming
from plait.broker.schedule import due_delivery as schedule
from plait.broker.schedule.delayed_requests import count_scheduled, list_scheduled
from plait.frame.columns import Column
from plait.storage.checkpoint import KEEP
from plait.storage.schedule.bucket import GRID, NEVER
from tests.broker.schedule_node import SECOND, delayed_frame, delivered_frames, run_due, schedules, submit
from tests.support.broker_node import Node, Producer

SUBJECTS = st.sampled_from(["orders", "bills"])
#: Seconds for which delivered rows are kept: longer than most examples last.
RETENTION = 10_000_000.0
#: From none to two years: all kinds of buckets.
DELAYS = st.sampled_from([-1.0, 0.01, 0.5, 1.0, 1.5, 3.0, 60.0, 700.0, 4_000.0, 90_000.0, 2_000_000.0, 63_000_000.0])


@dataclass
class Waiting:
    """A waiting message."""

    subject: str
    id: tuple[int, int]
    body: bytes
    key: bytes
    due: int


class Scheduling(RuleBasedStateMachine):
    """Two subjects whose messages wait, are rescheduled and cancelled, while clocks jump and brokers crash."""

    @initialize(flush=st.sampled_from(["sync", "async"]), few=st.booleans())
    def start(self, flush: str, few: bool) -> None:
        # Small limits have the effect of many rows.
        upcoming.LOAD_MAX = 3 if few else 32_768
        schedule.DELIVER_MAX = 2 if few else 8_192
        snapshot.BUCKET_ROWS_MAX = snapshot.BUCKET_ROWS_NOW_MAX = 4 if few else 200_000
        self.node = Node(flush=flush, checkpoint_bytes=1 << 40, retention_seconds=RETENTION)
        self.producer = Producer(1)
        #: (subject, number) → the waiting message.
        self.waiting: dict[tuple[str, int], Waiting] = {}
        #: Subject → the sequence below which rows were compared.
        self.seen: dict[str, int] = {"orders": 0, "bills": 0}
        self.gone: set[tuple[int, int]] = set()

    def teardown(self) -> None:
        """In the end, every waiting message is delivered once."""
        upcoming.LOAD_MAX, schedule.DELIVER_MAX = 32_768, 8_192
        snapshot.BUCKET_ROWS_MAX = snapshot.BUCKET_ROWS_NOW_MAX = 200_000
        if hasattr(self, "node"):
            self.node.clock.advance(70_000_000.0)
            self.compare()
            assert self.waiting == {}

    # --- steps ----------------------------------------------------------------------------------

    @rule(
        subject=SUBJECTS,
        delays=st.lists(DELAYS, min_size=1, max_size=6),
        one=st.booleans(),
        keys=st.booleans(),
        packed=st.booleans(),
    )
    def send(self, subject: str, delays: list[float], one: bool, keys: bool, packed: bool) -> None:
        now = self.node.clock.now()
        due = [now + int(seconds * SECOND) for seconds in ([delays[0]] * len(delays) if one else delays)]
        first = self.producer.next
        bodies = [f"{first + i}:".encode() * (200 if packed else 1) for i in range(len(due))]
        texts = [f"k{first + i}" for i in range(len(due))]
        columns = {"keys": texts, "key_hashes": np.arange(len(due), dtype=np.uint64)} if keys else {}
        sent = submit(
            self.node,
            delayed_frame(
                self.producer,
                due[0] if one else due,
                *bodies,
                subject=subject,
                compression="lz4" if packed else None,
                **columns,
            ),
        )
        self.node.turn()
        assert sent.sequence is not None
        for i, (body, time) in enumerate(zip(bodies, due, strict=True)):
            key = texts[i].encode() if keys else b""
            self.waiting[subject, sent.sequence + i] = Waiting(subject, (1, first + i), body, key, time)

    @rule(subject=SUBJECTS)
    def send_at_once(self, subject: str) -> None:
        """Send a message without a delay."""
        assert self.node.send(subject, b"plain", producer=self.producer).acknowledged

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), right=st.booleans())
    def cancel(self, data: st.DataObject, right: bool) -> None:
        subject, number = data.draw(st.sampled_from(sorted(self.waiting)))
        due = self.waiting[subject, number].due
        assert not delayed_requests.cancel(self.node.broker, subject, number, due + 1)
        if right:
            assert delayed_requests.cancel(self.node.broker, subject, number, due)
            self.gone.add(self.waiting.pop((subject, number)).id)
            assert not delayed_requests.cancel(self.node.broker, subject, number, due)
        self.node.turn()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), seconds=DELAYS)
    def reschedule(self, data: st.DataObject, seconds: float) -> None:
        subject, number = data.draw(st.sampled_from(sorted(self.waiting)))
        row = self.waiting.pop((subject, number))
        to = self.node.clock.now() + int(seconds * SECOND)
        moved = delayed_requests.reschedule(self.node.broker, subject, number, row.due, to)
        assert moved is not None
        row.due = to
        self.waiting[subject, moved] = row
        self.node.turn()

    @rule(seconds=st.sampled_from([0.0, 0.25, 1.0, 2.5, 50.0, 650.0, 5_000.0, 100_000.0]))
    def time_passes(self, seconds: float) -> None:
        self.node.clock.advance(seconds)

    @precondition(lambda self: self.waiting)
    @rule(early=st.sampled_from([0, 1, 1000]))
    def time_passes_until_just_before(self, early: int) -> None:
        """Advance the clock to the next due time, or to just before it."""
        ahead = min(row.due for row in self.waiting.values()) - self.node.clock.now() - early
        if ahead > 0:
            self.node.clock.advance(ahead / SECOND)

    @rule(seconds=st.sampled_from([-100_000.0, -3_600.0, -1.0, 1.0, 3_600.0]))
    def clock_jumps(self, seconds: float) -> None:
        self.node.clock.jump(seconds)

    @rule()
    def some_turns(self) -> None:
        """Run some turns, which may not deliver all due rows; a crash may follow."""
        self.node.broker.run_timers()
        self.node.turn()
        self._match()

    @rule()
    def compare(self) -> None:
        run_due(self.node)
        self._match()
        now = self.node.clock.now()
        late = [place for place, row in self.waiting.items() if row.due <= now]
        assert late == [], "due rows were not delivered"

    @rule(subject=SUBJECTS, start=DELAYS, end=DELAYS, limit=st.sampled_from([1, 3, 1000]))
    def list_and_count(self, subject: str, start: float, end: float, limit: int) -> None:
        now = self.node.clock.now()
        low, high = now + int(start * SECOND), now + int(end * SECOND)
        mine = sorted(
            (row.due, number, *row.id, row.key.decode() or None, len(row.body))
            for (name, number), row in self.waiting.items()
            if name == subject and low <= row.due < high
        )
        broker = self.node.broker
        self.node.partition(subject)
        found: list[tuple[object, ...]] = []
        after = None
        more = True
        while more:
            page = list_scheduled(broker, subject, low, high, after, limit)
            found += [(v.deliver_at, v.number, v.producer, v.sequence, v.key, v.size) for v in page.rows]
            after, more = page.next, page.next is not None
        assert found == mine
        [*counts] = count_scheduled(broker, subject, low, high, "subject")
        assert sum(view.count for view in counts) == len(mine)
        times = {view.bucket: view.count for view in count_scheduled(broker, subject, low, high, "time")}
        assert times == Counter(due // GRID * GRID for due, *_ in mine)

    @rule()
    def checkpoint(self) -> None:
        self.node.checkpoint()

    @rule(steps=st.integers(1, 4))
    def slow_checkpoint(self, steps: int) -> None:
        for _ in range(steps):
            self.node.checkpoint_step()

    @rule(seconds=st.sampled_from([0.0, 2 * RETENTION]))
    def retention(self, seconds: float) -> None:
        """Expire delivered rows and bucket waiting ones: only checkpoints then retain the log."""
        self.node.clock.advance(seconds)
        self.compare()
        for _ in range(KEEP):
            assert self.node.send("others", b"x" * 3000, producer=self.producer).acknowledged
            self.node.checkpoint()
        self.node.clock.advance(seconds)
        self.compare()
        self.node.checkpoint()
        self.node.retention.run()
        self.node.turn()
        broker = self.node.broker
        if seconds and not any(len(each.unbucketed.due) for each in schedules(self.node).by_name.values()):
            assert broker.message_log.segments[0].end > broker.checkpoints.message_needed, (
                "the log is retained without need"
            )

    @rule(data=st.data())
    def checkpoint_meanwhile(self, data: st.DataObject) -> None:
        """Make a checkpoint, which may fail, with other steps before its end."""
        work = self.node.broker.snapshots.begin()
        done = False
        for step in data.draw(st.lists(st.sampled_from(["cancel", "copy", "move", "turn", "run", "send"]), max_size=6)):
            if step == "copy" and work.sync is None:
                work.copy_some(1)
            elif step == "run" and not done:
                done = self._run_work(data, work.copy_all())
            elif step == "turn":
                self.some_turns()
            elif step == "send":
                self.send("orders", [0.5, 700.0], one=False, keys=False, packed=False)
            elif self.waiting:
                self.cancel(data, right=True) if step == "cancel" else self.reschedule(data, 60.0)
        if not done:
            self._run_work(data, work.copy_all())
        self.node.broker.snapshots.end(work)

    def _run_work(self, data: st.DataObject, work: object) -> bool:
        if data.draw(st.booleans()):
            self.node.disk.fail("write", path="schedule/*", error=28)
        work.run()  # type: ignore[attr-defined]
        self.node.disk._faults.clear()
        return True

    @rule(orderly=st.booleans())
    def crash(self, orderly: bool) -> None:
        self.node = self.node.restart() if orderly else self.node.killed()

    @precondition(lambda self: self.node.config.flush == "sync")
    @rule(seed=st.integers(0, 1000))
    def lose_power(self, seed: int) -> None:
        self.node = self.node.power_lost("random", Random(seed))

    @rule()
    def fall_back(self) -> None:
        """Damage the newest checkpoint and restart."""
        disk = self.node.disk
        names = [name for name in disk.list("checkpoints") if name.startswith("manifest-")]
        if len(names) > 2:
            self.node = self.node.killed()
            self.node.disk.flip_bit(f"checkpoints/{sorted(names)[-1]}", 20, 3)
            self.node = self.node.killed()

    # --- checks ---------------------------------------------------------------------------------

    def _match(self) -> None:
        """Check the rows delivered since the last check: they were due, are in order, and are as sent."""
        now = self.node.clock.now()
        for subject in self.seen:
            frames = [
                frame
                for frame in delivered_frames(self.node, subject, self.seen[subject])
                if frame.has(Column.SCHEDULE)
            ]
            rows = [
                (frame.store_time, *row)
                for frame in frames
                for row in zip(
                    frame.fixed(Column.SCHEDULE).tolist(),
                    frame.fixed(Column.DELIVER_AT).tolist(),
                    *[ids.tolist() for ids in frame.message_ids()],
                    frame.binary(Column.BODY).to_pylist(),
                    frame.binary(Column.KEY).to_pylist() if frame.has(Column.KEY) else [b""] * frame.count,
                    strict=True,
                )
            ]
            moment = (0, 0)
            for stored, number, due, producer, sequence, body, key in rows:
                assert due <= stored, "it was delivered early"
                assert (producer, sequence) not in self.gone, "it was cancelled or already delivered"
                row = self.waiting.pop((subject, number))
                assert (row.id, row.due, row.body, row.key) == ((producer, sequence), due, body, key)
                assert due <= now
                self.gone.add(row.id)
                assert stored != moment[0] or due >= moment[1], "out of order"
                moment = (stored, due)
            self.seen[subject] = self.node.partition(subject).next

    @invariant()
    def everything_is_counted(self) -> None:
        self._match()
        assert schedules(self.node).count == len(self.waiting)
        counts = {view.subject: view.count for view in count_scheduled(self.node.broker, None, 0, NEVER, "subject")}
        assert counts == Counter(subject for subject, _ in self.waiting)
        assert schedules(self.node).lost_count == 0


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
