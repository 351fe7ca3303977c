"""Transactions compared with a simple model of each, with crashes between steps and inside disk operations.

Producers send half messages, decide, decide again, and answer checks; operators decide too. The process is killed, or
the machine loses power, between any two steps and at any disk operation. What a transaction published must be all of
its messages if its commit was confirmed, none if it was rolled back, and all or none if the fate of a commit is
unknown; each message once. No check comes early.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from plait.broker.config import BrokerConfig
from plait.broker.recovery import checkpointer
from plait.broker.transactions import half_publisher
from plait.broker.transactions.transaction_table import COMMITTED
from plait.errors import (
    DiskFull,
    FlowControl,
    LimitExceeded,
    TransactionDecided,
    TransactionIncomplete,
    TransactionNotFound,
)
from plait.limits import ServerLimits
from plait.model.settings import SubjectSettings
from plait.storage.checkpoint import KEEP
from plait.testing.simulated_disk import SimulatedCrash
from tests.broker.schedule_node import run_due
from tests.broker.transaction_node import PRODUCERS, Polled, Tx
from tests.support.broker_node import NO_WATERMARKS, SMALL_SEGMENTS, Node, Producer

SUBJECTS = ("a", "b", "c")
CHECKS = 3
LIMITS = ServerLimits(transaction_checks=CHECKS, transactions=40)
#: What the tests of this file let happen. With ``async`` flush, a power failure may lose what was confirmed.
MODES = ("sync", "async", "async with power failures")


class Deal:
    """A transaction as the model has it."""

    def __init__(self, tx: Tx) -> None:
        self.tx = tx
        #: (subject, body) of the messages that may be stored; all are, unless ``doubtful``.
        self.rows: list[tuple[str, bytes]] = []
        self.doubtful = False
        #: The outcomes that were requested, and the one that was confirmed.
        self.requested: set[bool] = set()
        self.outcome: bool | None = None
        #: The monotonic time before which no check may come, and how many came.
        self.quiet_until = 0.0
        self.checks = 0


class Model:
    """One broker, its transactions, and what they may have published."""

    def __init__(self, seed: int, mode: str) -> None:
        self.draw = random.Random(seed)
        self.mode = mode
        flush = "sync" if mode == "sync" else "async"
        config = BrokerConfig(**SMALL_SEGMENTS, **NO_WATERMARKS, flush=flush, limits=LIMITS)  # type: ignore[arg-type]
        self.node = Node(config=config)
        self.node.broker.create_subject("others", SubjectSettings(retention_bytes=1))
        self.node.turn()
        self.deals: dict[int, Deal] = {}
        self.number = 0
        self.filler = Producer(1)
        self.crashes = 0

    # --- steps ----------------------------------------------------------------------------------

    def send(self) -> None:
        undecided = [deal for deal in self.deals.values() if not deal.requested and not deal.doubtful]
        if not undecided or self.draw.random() < 0.3:
            self.number += 1
            deal = Deal(Tx(1_000 + self.number))
            try:
                deal.tx.begin(self.node)
            except LimitExceeded:
                assert len(self.node.broker.transactions.table.live) == LIMITS.transactions
                return
            self.deals[deal.tx.id] = deal
        else:
            deal = self.draw.choice(undecided)
        subject = self.draw.choice(SUBJECTS)
        count = self.draw.choice([1, 1, 2])
        bodies = [b"%d:%d:" % (deal.tx.id, deal.tx.next + n) + b"x" * self.draw.choice([0, 300]) for n in range(count)]
        sent = deal.tx.frame(self.node, subject, *bodies, delay=self.draw.choice([0.0, 0.0, 0.5, 60.0]))
        deal.doubtful = True
        for _ in range(self.draw.choice([1, 1, 2])):
            # Perhaps a resend.
            deal.tx.submit(self.node, sent)
        self.node.turn()
        if not sent.answers:
            return
        error = sent.answers[0][1]
        if error is None:
            deal.doubtful = False
            deal.rows += [(subject, body) for body in bodies]
            deal.quiet_until = self.node.clock.monotonic() + LIMITS.transaction_check_first_seconds
        elif isinstance(error, TransactionNotFound):
            # A restart forgot the transaction: it had no rows, or a power failure lost them.
            assert not deal.rows or self.mode == MODES[2]
            del self.deals[deal.tx.id]
        else:
            assert isinstance(error, DiskFull), error

    def decide(self) -> None:
        """Request an outcome: for the first time, again, or another one than before."""
        if self.deals:
            deal = self.draw.choice(list(self.deals.values())[-6:])
            self._decide(deal, commit=self.draw.random() < 0.6)

    def _decide(self, deal: Deal, *, commit: bool, turns: float = 0.8) -> None:
        commit = commit and not deal.doubtful
        deal.requested.add(commit)
        confirmed: list[bool] = []
        rows = len(deal.rows) if self.draw.random() < 0.7 and not self._deleted(deal) else None
        try:
            self.node.broker.transactions.decide(deal.tx.id, commit=commit, rows=rows)
        except TransactionDecided as error:
            assert deal.outcome is not commit
            # A server answers this after the commit too.
            commit = error.details["outcome"] == "committed"
        except (TransactionNotFound, TransactionIncomplete):
            assert not deal.rows or self.mode == MODES[2] or self._deleted(deal)
            deal.requested = {False}
            return
        except DiskFull:
            return
        self.node.broker.turn.answer_after_commit(lambda: confirmed.append(True))
        if self.draw.random() < turns:
            self.node.turn()
            if confirmed:
                self._confirmed(deal, committed=commit)

    def _confirmed(self, deal: Deal, *, committed: bool) -> None:
        assert committed in deal.requested, "decided otherwise than anyone asked for"
        assert deal.outcome in (None, committed), "the outcome changed"
        deal.outcome = committed

    def _deleted(self, deal: Deal) -> bool:
        return any(subject.startswith("-") for subject, _ in deal.rows)

    def check(self) -> None:
        """A producer waits for checks, and decides some."""
        polled = Polled(gone=self.draw.random() < 0.2)
        self.node.broker.check_backs.poll(PRODUCERS, self.draw.choice([0.5, 20.0]), polled.answer)
        self.node.turn()
        self.time(self.draw.choice([0.0, 0.6, 7.0]))
        for number in [number for found in polled.answers for number in found]:
            deal = self.deals[number]
            assert deal.outcome is None, "a decided transaction is checked"
            assert self.node.clock.monotonic() >= deal.quiet_until, "a check comes early"
            deal.checks += 1
            assert deal.checks <= CHECKS
            deal.quiet_until = self.node.clock.monotonic()
            if self.draw.random() < 0.6:
                self._decide(deal, commit=self.draw.random() < 0.5)

    def time(self, seconds: float | None = None) -> None:
        self.node.clock.advance(self.draw.choice([0.1, 1.0, 6.0, 31.0, 100.0]) if seconds is None else seconds)
        run_due(self.node)

    def some_turns(self) -> None:
        self.node.broker.run_timers()
        self.node.turn()

    def checkpoint(self) -> None:
        if self.draw.random() < 0.3:
            self.node.disk.fail("write", path="checkpoints/*", error=28)
        try:
            self.node.checkpoint()
        except OSError:
            pass
        finally:
            self.node.disk._faults.clear()

    def checkpoint_step(self) -> None:
        self.node.checkpoint_step()

    def retention(self) -> None:
        """Fill the log, and delete its segments except for half messages, which move."""
        for _ in range(self.draw.choice([1, KEEP])):
            for _ in range(3):
                try:
                    self.node.send("others", b"y" * 3000, producer=self.filler)
                except FlowControl:
                    return
            if self.node.broker.snapshots.work is None:
                self.node.checkpoint()
            self.node.retention.run()
            self.node.turn()

    def fill_disk(self) -> None:
        broker = self.node.broker
        broker.turn.low_space = "" if broker.turn.low_space else "the disk is full"

    def delete(self) -> None:
        """Delete a subject with its messages, also those of transactions."""
        subject = self.draw.choice(SUBJECTS)
        if self.draw.random() < 0.2 and subject in self.node.broker.subjects and not self.node.broker.turn.low_space:
            self.node.turn()
            self.node.broker.delete_subject(subject)
            self.node.turn()
            # The model does not expect that a power failure undoes it.
            self.node.sync()
            for deal in self.deals.values():
                deal.rows = [(f"-{name}" if name == subject else name, body) for name, body in deal.rows]
                # The numbering of a new half partition starts again: a client would not notice the deletion.
                deal.tx.last.pop(subject, None)
                if deal.doubtful:
                    deal.requested.add(False)

    # --- crashes --------------------------------------------------------------------------------

    def crash(self) -> None:
        self._restart(orderly=self.draw.random() < 0.2)

    def fall_back(self) -> None:
        """Damage the newest checkpoint and restart."""
        disk = self.node.disk
        names = sorted(name for name in disk.list("checkpoints") if name.startswith("manifest-") and "." not in name)
        if len(names) > 2 and self.mode != MODES[2]:
            self.node = self.node.killed()
            self.node.disk.flip_bit(f"checkpoints/{names[-1]}", 20, 3)
            self._restart(orderly=False, power=False)

    def _restart(self, *, orderly: bool, power: bool = True) -> None:
        self.crashes += 1
        if orderly and self.node.broker.turn.failed is None:
            self.node = self.node.restart()
        elif self.mode == MODES[1] or not power or self.draw.random() < 0.4:
            self.node = self.node.killed()
        else:
            self.node = self.node.power_lost(self.draw.choice(["none", "random"]), self.draw)
            if self.mode == MODES[2]:
                self._learn()
        now = self.node.clock.monotonic()
        for deal in self.deals.values():
            deal.quiet_until = now + LIMITS.transaction_check_first_seconds

    def _learn(self) -> None:
        """Adjust the model to what a power failure lost with async flush."""
        table = self.node.broker.transactions.table
        for number, deal in list(self.deals.items()):
            deal.outcome, deal.doubtful = table.decided.get(number), True
            live = table.live.get(number)
            if live is None and deal.outcome is None:
                del self.deals[number]
            elif live is not None and live.state != COMMITTED:
                assert live.rows <= len(deal.rows) + 2
                deal.rows = deal.rows[: live.rows]
                deal.checks = live.checks

    def step(self, action: Callable[[], None]) -> None:
        """Take a step, which may end at one of its disk operations."""
        disk = self.node.disk
        if action != self.delete and self.draw.random() < 0.15:
            disk.crash_at(disk.operations + self.draw.randrange(12), self.draw.randrange(400))
        try:
            action()
        except SimulatedCrash:
            self._restart(orderly=False)
        except (FlowControl, DiskFull):
            pass
        self.node.disk._crash_operation = -1
        self.look()

    # --- checks ---------------------------------------------------------------------------------

    def look(self) -> dict[int, Counter[bytes]]:
        """Check what is published: messages of transactions that may be committed, each once."""
        found: dict[int, Counter[bytes]] = {}
        for subject in SUBJECTS:
            if subject not in self.node.broker.subjects:
                continue
            for body in self.node.bodies(subject):
                number = int(body.split(b":")[0])
                found.setdefault(number, Counter())[body] += 1
                deal = self.deals[number]
                assert True in deal.requested, "published before the commit"
                assert deal.outcome is not False, "published after the rollback"
                assert (subject, body) in deal.rows, "published although it was not stored"
        assert all(count == 1 for bodies in found.values() for count in bodies.values()), "published twice"
        return found

    def finish(self) -> None:
        """Decide everything, deliver everything, and compare."""
        self.node.broker.turn.low_space = ""
        while self.node.broker.snapshots.work is not None:
            self.node.checkpoint_step()
        for deal in self.deals.values():
            if deal.outcome is None:
                self._decide(deal, commit=False, turns=1.0)
        self.node.turn()
        for _ in range(6):
            self.time(100.0)
        found = self.look()
        table = self.node.broker.transactions.table
        assert not table.live
        assert (table.rows, table.size) == (0, 0)
        assert self.node.broker.schedules.count == 0
        assert self.node.broker.schedules.lost_count == 0
        for number, deal in self.deals.items():
            mine = {body for subject, body in deal.rows if not subject.startswith("-")}
            published = set(found.get(number, ()))
            assert published == (mine if deal.outcome else set()), (number, deal.outcome)


def run(seed: int, steps: int, mode: str) -> Model:
    model = Model(seed, mode)
    actions = [model.send] * 8 + [model.decide] * 5 + [model.check] * 2 + [model.time] * 2 + [model.some_turns] * 2
    actions += [model.checkpoint, model.retention, model.fill_disk, model.delete, model.crash, model.fall_back]
    actions += [model.checkpoint_step] * 2
    for _ in range(steps):
        model.step(model.draw.choice(actions))
    model.finish()
    return model


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits with the effect of many messages: one or two frames in a turn."""
    monkeypatch.setattr(half_publisher, "PUBLISH_SIZE_MAX", 700)
    monkeypatch.setattr(half_publisher, "FRAME_COST", 300)
    monkeypatch.setattr(checkpointer, "BUCKET_ROWS_MAX", 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", range(10))
def test_transactions_are_published_as_they_were_decided(seed: int, number: int, mode: str):
    crashes = sum(run(seed * 10_000 + 10 * number + each, 50, mode).crashes for each in range(7))
    assert crashes > 3


@pytest.mark.deep("models")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", range(300))
def test_many_more_seeds(seed: int, number: int, mode: str):
    run(seed * 10_000 + 1_000 + number, 200, mode)
