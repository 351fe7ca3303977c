"""``FiringModel``: recurrences of two meta servers, fired into two brokers, with crashes between any two steps.

The meta servers share one SQLite database and have clocks of their own. The brokers are Plait's, on simulated disks. A
frame of firings may be sent late, twice, by either server, or not at all. Transactions fail before or after their
commit. The model knows each definition and what was decided; the brokers' logs must have each firing once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from plait.clock import ManualClock
from plait.errors import (
    MetaUnavailable,
    OutOfSequence,
    PlaitError,
    ProducerConflict,
    RecurrenceNotFound,
    UnknownProducer,
)
from plait.frame.columns import Column
from plait.frame.view import FrameView
from plait.limits import CATCH_UP_MAX
from plait.meta.database.connection import Database
from plait.meta.database.schema import FIRING_FRAMES, RECURRENCES
from plait.meta.database.store import Store
from plait.meta.recurring.firings import PendingFrame
from plait.meta.recurring.occurrences import Rule
from plait.meta.service import MetaService
from plait.testing.embedded_broker import empty_database
from plait.wire.admin.recurrences import CreateRecurrence, RecurrenceRow, SetRecurrence
from tests.broker.schedule_node import delivered_frames, run_due
from tests.meta.support import converge
from tests.support.broker_node import Node

SECOND = 1_000_000
SUBJECTS = ("orders", "bills")
GROUPS = ("g1", "g2")
RULES: tuple[dict[str, Any], ...] = (
    {"every": 1.0},
    {"every": 7.0},
    {"every": 60.0},
    {"cron": "* * * * *"},
    {"cron": "30 2 * * *", "zone": "Europe/Berlin"},
    {"cron": "*/20 1-3 * * *", "zone": "America/New_York"},
)
STEPS = (0.0, 0.5, 1.0, 3.0, 20.0, 61.0, 400.0, 4_000.0, 90_000.0)


class Server:
    """One meta server: a service that can be started again, and its clock."""

    def __init__(self, path: Path, clock: ManualClock) -> None:
        self._path = path
        self.clock = clock
        #: "before" or "after": the next transaction fails before or after its commit.
        self.failing = ""
        self.start()

    def start(self) -> None:
        database = Database(f"sqlite:///{self._path}")
        self.store = Store(database, cluster="test", alone=False)
        self.service = MetaService(self.store, self.clock)
        writing = database.writing

        @contextmanager
        def fails() -> Iterator[Any]:
            failing, self.failing = self.failing, ""
            with writing() as connection:
                yield connection
                if failing == "before":
                    raise MetaUnavailable("the transaction failed")
            if failing == "after":
                raise MetaUnavailable("the answer of the commit was lost")

        database.writing = fails  # type: ignore[method-assign]

    def crash(self) -> None:
        self.store.close()
        self.failing = ""
        self.start()


class FiringModel:
    """``run`` draws and checks the given number of steps."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.draw = random.Random(f"{seed} firings")
        path = directory / f"meta-{seed}.db"
        path.write_bytes(empty_database())
        # Shortly before a night in which clocks are set back.
        begin = self.draw.choice((1_761_400_000, 1_743_270_000, 1_700_000_000)) * SECOND
        skew = self.draw.choice((5, 3_000))
        self.clocks = [ManualClock(begin + self.draw.randrange(-skew, skew) * SECOND) for _ in range(2)]
        self.servers = [Server(path, clock) for clock in self.clocks]
        flush = self.draw.choice(("sync", "async"))
        self.nodes = {
            group: Node(clock=ManualClock(begin + self.draw.randrange(-3, 4) * SECOND), group=group, flush=flush)
            for group in GROUPS
        }
        service = self.servers[0].service
        for group in GROUPS:
            service.register_broker(group, f"{group}-1", f"plait://{group}:1")
        for subject in SUBJECTS:
            service.subjects.create(subject, groups=list(GROUPS))
        converge(service)
        #: Frames that a server has read and may still send, also after they are confirmed.
        self.frames: list[PendingFrame] = []
        #: Recurrence → the definitions that it had, each with the moment from which it counts.
        self.known: dict[str, list[RecurrenceRow]] = {}
        #: (recurrence, number) → due time, of every firing that a broker has delivered.
        self.delivered: dict[tuple[str, int], int] = {}
        self.decided: dict[tuple[str, int], int] = {}
        self.seen = dict.fromkeys([(group, subject) for group in GROUPS for subject in SUBJECTS], 0)
        #: Recurrences that were changed, paused or removed.
        self.touched: set[str] = set()
        self._number = 0

    def close(self) -> None:
        for server in self.servers:
            server.store.close()

    def run(self, steps: int) -> None:
        actions: list[tuple[Callable[[], None], int]] = [
            (self.create, 3),
            (self.change, 2),
            (self.pause, 1),
            (self.resume, 1),
            (self.remove, 1),
            (self.time_passes, 6),
            (self.pause_shortly, 2),
            (self.clock_jumps, 2),
            (self.decide, 8),
            (self.read_pending, 4),
            (self.send, 8),
            (self.send_old, 2),
            (self.fail_next, 2),
            (self.crash_server, 2),
            (self.crash_broker, 2),
            (self.deliver, 3),
        ]
        self.create()
        for _ in range(steps):
            [action] = self.draw.choices([each for each, _ in actions], [weight for _, weight in actions])
            try:
                action()
            except MetaUnavailable:
                continue
        self.settle()

    # --- operators ------------------------------------------------------------------------------

    @property
    def server(self) -> Server:
        return self.draw.choice(self.servers)

    def create(self) -> None:
        self._number += 1
        request = CreateRecurrence(
            f"r{self._number}",
            self.draw.choice(SUBJECTS),
            b"body",
            catch_up=self.draw.choice(("one", "all", "none")),
            key=self.draw.choice((None, "k1", "k2")),
            tags=self.draw.choice(([], ["t"])),
            headers=self.draw.choice(({}, {"city": "BJS"})),
            **self.draw.choice(RULES),
        )
        self.known[request.name] = []
        with self._may_be_gone(request.name):
            self.known[request.name].append(self.server.service.recurrences.create(request))
        self.touched.discard(request.name)

    def _some(self) -> str:
        return self.draw.choice(sorted(self.known))

    def change(self) -> None:
        name = self._some()
        fields = dict(self.draw.choice(RULES)) if self.draw.random() < 0.6 else {"body": b"other"}
        with self._may_be_gone(name):
            self.known[name].append(self.server.service.recurrences.set(SetRecurrence(name, **fields)))

    def pause(self) -> None:
        name = self._some()
        with self._may_be_gone(name):
            self.server.service.recurrences.pause(name, paused=True)

    def resume(self) -> None:
        name = self._some()
        with self._may_be_gone(name):
            self.server.service.recurrences.pause(name, paused=False)

    def pause_shortly(self) -> None:
        name = self._some()
        with self._may_be_gone(name):
            self.server.service.recurrences.pause(name, paused=True)
            self.server.service.recurrences.pause(name, paused=False)

    def remove(self) -> None:
        name = self._some()
        with self._may_be_gone(name):
            self.server.service.recurrences.remove(name)

    @contextmanager
    def _may_be_gone(self, name: str) -> Iterator[None]:
        try:
            yield
            if self.known[name]:
                self.touched.add(name)
        except RecurrenceNotFound:
            return
        except MetaUnavailable:
            self.touched.add(name)
            # The change may be made: remember what the database has.
            self._learn(name)
            raise

    def _learn(self, name: str) -> None:
        try:
            self.known[name].append(self.servers[0].service.recurrences.describe(name))
        except RecurrenceNotFound:
            return

    # --- time -----------------------------------------------------------------------------------

    def time_passes(self) -> None:
        seconds = self.draw.choice(STEPS)
        for clock in (*self.clocks, *(node.clock for node in self.nodes.values())):
            clock.advance(seconds)

    def clock_jumps(self) -> None:
        self.draw.choice(self.clocks).jump(self.draw.choice((-4_000.0, -10.0, 10.0, 100.0)))

    # --- firing ---------------------------------------------------------------------------------

    def decide(self) -> None:
        server = self.server
        now = server.clock.now()
        before = self._firings()
        try:
            decided = server.service.firings.decide()
        finally:
            self._note(before)
        for frame in decided.frames:
            view = FrameView(frame.frame)
            assert int(view.values(Column.DELIVER_AT).max()) <= now, "it was decided before it was due"
        self.frames += decided.frames

    def _firings(self) -> dict[str, int]:
        with self.servers[0].store.database.reading() as connection:
            return {row.name: row.firings for row in connection.execute(RECURRENCES.select())}

    def _note(self, before: dict[str, int]) -> None:
        for name, firings in self._firings().items():
            for number in range(before.get(name, 0) + 1, firings + 1):
                assert (name, number) not in self.decided, "a number is given twice"
                self.decided[name, number] = -1

    def read_pending(self) -> None:
        self.frames += self.server.service.firings.pending()

    def send(self) -> None:
        """Send a frame that was read; the answer may be lost, or the server may not confirm it."""
        if not self.frames:
            return
        frame = self.frames.pop(self.draw.randrange(len(self.frames)))
        server = self.server
        way = self.draw.choice(("all", "all", "all", "no answer", "not sent"))
        if way == "not sent":
            return
        if not self._is_current(frame):
            # A server sends what it has read a moment ago.
            return
        error = self._store(frame)
        if way == "no answer":
            return
        if error is None:
            server.service.firings.confirm([frame])
        elif isinstance(error, OutOfSequence | UnknownProducer | ProducerConflict):
            self.frames += server.service.firings.restart(frame)

    def send_old(self) -> None:
        """Send a frame, and send it again when another server may have confirmed it."""
        pending = self.server.service.firings.pending()
        if pending:
            frame = self.draw.choice(pending)
            if self._store(frame) is None:
                self.server.service.firings.confirm([frame])
                error = self._store(frame)
                assert error is None, error

    def _is_current(self, frame: PendingFrame) -> bool:
        with self.servers[0].store.database.reading() as connection:
            return frame.producer in [row.producer for row in connection.execute(FIRING_FRAMES.select())]

    def _store(self, frame: PendingFrame) -> PlaitError | None:
        node = self.nodes[frame.place.group]
        answers: list[PlaitError | None] = []
        node.partition(frame.place.name)
        schedule = node.broker.schedules.partition_of(frame.place.name)
        try:
            node.broker.submit(schedule, FrameView(frame.frame), lambda _, error: answers.append(error))
        except PlaitError as error:
            return error
        node.turn()
        return answers[0]

    # --- faults ---------------------------------------------------------------------------------

    def fail_next(self) -> None:
        self.server.failing = self.draw.choice(("before", "after"))

    def crash_server(self) -> None:
        self.server.crash()

    def crash_broker(self) -> None:
        group = self.draw.choice(GROUPS)
        node = self.nodes[group]
        if self.draw.random() < 0.3:
            node.checkpoint()
        if node.config.flush == "sync" and self.draw.random() < 0.5:
            self.nodes[group] = node.power_lost("random", self.draw)
        else:
            self.nodes[group] = node.killed() if self.draw.random() < 0.7 else node.restart()

    # --- checks ---------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Deliver due rows at the brokers, and check them."""
        for group, node in self.nodes.items():
            run_due(node)
            for subject in SUBJECTS:
                for frame in delivered_frames(node, subject, self.seen[group, subject]):
                    self._check(frame, node.clock.now())
                self.seen[group, subject] = node.partition(subject).next

    def _check(self, frame: FrameView, now: int) -> None:
        dues = frame.fixed(Column.DELIVER_AT).tolist()
        for row, headers in enumerate(frame.binary(Column.HEADERS).to_pylist()):
            found = msgspec.msgpack.decode(headers)
            name, number, due = found["plait-recurrence"], found["plait-firing"], found["plait-due"]
            assert due == dues[row] <= now, "it was delivered before it was due"
            assert (name, number) not in self.delivered, "it was delivered twice"
            assert (name, number) in self.decided, "it was never decided"
            assert any(_fires(definition, due) for definition in self.known[name]), "the rule has no such time"
            self.delivered[name, number] = due

    def settle(self) -> None:
        """Let everything be sent, and compare."""
        for server in self.servers:
            server.failing = ""
        service = self.servers[0].service
        for clock in (*self.clocks, *(node.clock for node in self.nodes.values())):
            clock.advance(10.0)
        for _ in range(2_000):
            self.clocks[0].advance(0.01)
            self.nodes["g1"].clock.advance(0.01)
            before = self._firings()
            decided = service.firings.decide()
            self._note(before)
            pending = service.firings.pending()
            for frame in pending:
                error = self._store(frame)
                if error is None:
                    service.firings.confirm([frame])
                else:
                    assert service.firings.restart(frame)
            if not pending and not decided.more and (decided.wait is None or decided.wait > 0):
                break
        else:
            raise AssertionError("the firings do not come to an end")
        # A meta server's clock may be ahead of the brokers' clocks.
        for node in self.nodes.values():
            node.clock.advance(200_000.0)
        self.deliver()
        assert self.delivered.keys() == self.decided.keys(), "firings are lost"
        last: dict[str, int] = {}
        for (name, _), due in sorted(self.delivered.items()):
            assert due > last.get(name, 0), "due times do not grow"
            last[name] = due
        self._check_catching_up()

    def _check_catching_up(self) -> None:
        """A recurrence that was never changed or paused fires at every time of its rule, if it makes up for all."""
        for name, definitions in self.known.items():
            if len(definitions) != 1 or definitions[0].catch_up != "all" or name in self.touched:
                continue
            dues = [due for (of, _), due in sorted(self.delivered.items()) if of == name]
            rule, moment, run = _rule(definitions[0]), definitions[0].created, 0
            for due in dues:
                moment = rule.after(moment)
                if due != moment:
                    assert run >= CATCH_UP_MAX, f"{name} has left out {moment}"
                    moment, run = due, 0
                run += 1
            # The rest is skipped when so many were made up for.
            assert run >= CATCH_UP_MAX or rule.after(moment) > self.clocks[0].now(), f"{name} stopped at {moment}"


def _rule(row: RecurrenceRow) -> Rule:
    return Rule(row.cron, row.zone, None if row.every is None else round(row.every * SECOND), row.created)


def _fires(row: RecurrenceRow, due: int) -> bool:
    if row.every is not None:
        return True
    return _rule(row).after(due - 1) == due
