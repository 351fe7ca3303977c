"""Stores half messages, decides transactions, and publishes the half messages of committed ones.

Half messages are rows of hidden *half partitions*, one for each partition of a subject. The producer of a frame is its
transaction, and the note of the frame names the producer group, so replay needs no other record of a transaction. The
decision is one event of the action log for all rows of the transaction. A committed transaction is published by copying
its frames, unchanged, to the schedules of their partitions: the rows are due at once, or at their own due times, and
from there they follow the route like delayed rows (R20, R25).

A copy names the transaction and its rows in its header, so replay knows how far publishing came and continues from
there. A copy also proves the commit: after a power failure that lost the event and not the copy, the rest is published.
Transactions are decided once. Their ids are random, an outcome is remembered for a long time, and a half message is
stored only for a transaction that was begun before, so no late request touches another transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from plait.broker.catalog import Catalog
from plait.broker.commit import SendCallback
from plait.broker.partitions.partition import Partition
from plait.broker.schedule.due_delivery import check_due
from plait.broker.schedule.schedules import Schedules
from plait.broker.transactions.half_publisher import HalfPublisher
from plait.broker.transactions.transaction_table import (
    COMMITTED,
    PARKED,
    HalfFrame,
    StoredTransaction,
)
from plait.broker.turn import Turn
from plait.errors import (
    FrameError,
    InvalidArgument,
    LimitExceeded,
    OutOfSequence,
    PlaitError,
    StaleRoute,
    TransactionDecided,
    TransactionIncomplete,
    TransactionNotFound,
)
from plait.frame.columns import Column
from plait.frame.header import FLAG_UNSEQUENCED
from plait.frame.view import FrameView
from plait.model import names
from plait.storage.catalog import HALF, PartitionRow
from plait.storage.logs.action_events import (
    TransactionChecked,
    TransactionCommitted,
    TransactionEvent,
    TransactionParked,
    TransactionRolledBack,
)

#: Columns that a frame of half messages cannot have.
_REFUSED_BITS: Final = 1 << Column.RUNS | 1 << Column.SELECTION | 1 << Column.SCHEDULE


class Transactions:
    """All transactions of a broker."""

    def __init__(self, turn: Turn, catalog: Catalog, schedules: Schedules, publisher: HalfPublisher) -> None:
        self._turn = turn
        self._catalog = catalog
        self._schedules = schedules
        self._publisher = publisher
        self.table = publisher.table
        #: Called with an undecided transaction when it is stored or has a new row.
        self.on_stored: Callable[[StoredTransaction], None] = lambda transaction: None
        #: Partition name → its half partition.
        self._by_name = publisher.half_partitions
        catalog.kinds[HALF] = self

    # --- half partitions ------------------------------------------------------------------------

    def add(self, partition: Partition) -> None:
        self._by_name[partition.row.name] = partition

    def remove(self, partition: Partition) -> None:
        """Remove the half messages of a deleted subject."""
        if self._by_name.get(partition.row.name) is partition:
            del self._by_name[partition.row.name]
        self.table.drop_partition(partition.id)

    def of(self, name: str) -> list[Partition]:
        return [self._by_name[name]] if name in self._by_name else []

    def any_for(self, name: str) -> bool:
        """Whether a transaction has rows for the partition ``name`` that are not published."""
        return any(
            partition.id in transaction.parts for partition in self.of(name) for transaction in self.table.live.values()
        )

    def partition_of(self, name: str) -> Partition:
        """The half partition of a partition. Both, and its schedule, are created if they are missing."""
        target = self._catalog.partition_of(name)
        known = self._by_name.get(name)
        if known is not None:
            return known
        self._refuse_closed(name)
        # Publishing needs the schedule, and must not fail because it cannot be created.
        self._schedules.partition_of(name)
        number, now = self._catalog.next_partition, self._turn.clock.now()
        return self._catalog.create(PartitionRow(number, target.row.subject, name, now, kind=HALF))

    def _refuse_closed(self, name: str) -> None:
        """Raise if the partition accepts no rows at all: its schedule must not grow (ADR 22)."""
        target = self._catalog.subjects.get(name)
        if target is not None and target.accepts is not None and not target.accepts.any():
            raise StaleRoute(f"partition {name!r} takes no messages; refresh the route", version=target.row.route)

    # --- requests -------------------------------------------------------------------------------

    def begin(self, number: int, producer_group: str) -> None:
        """Begin a transaction. It is durable from its first row on."""
        names.check_group(producer_group)
        table, limits = self.table, self._turn.limits
        known = table.live.get(number)
        if known is not None or number in table.decided:
            if known is None or known.rows or known.producer_group != producer_group:
                raise InvalidArgument(f"transaction {number:016x} exists already; begin with a new random id")
            return
        self._turn.refuse_when_full()
        _check_limit("undecided transactions", "transactions", len(table.live) + 1, limits.transactions)
        if len(table.live) >= limits.transactions_parked:
            parked = table.parked_count + 1
            _check_limit("parked transactions", "transactions_parked", parked, limits.transactions_parked)
        self.on_stored(table.begin(number, producer_group, self._turn.clock.now()))

    def store(self, partition: Partition, frame: FrameView, reply: SendCallback | None) -> None:
        """Store a frame of half messages, which was validated; ``reply`` gets the result after the commit."""
        turn, log = self._turn, self._turn.message_log
        producer_group = producer_group_of(frame)
        if reply is None or frame.flags != FLAG_UNSEQUENCED or frame.column_bits & _REFUSED_BITS:
            raise FrameError("half messages need an unsequenced frame, not oneway, without runs, selection or schedule")
        if not frame.has(Column.DELIVER_AT):
            raise FrameError("half messages need due times; for a message without a delay, use the time of its send")
        check_due(int(frame.values(Column.DELIVER_AT).max()), turn.clock.now())
        transaction = self._undecided(frame.producer)
        if transaction.producer_group != producer_group:
            raise FrameError(
                f"transaction {frame.producer:016x} belongs to producer group {transaction.producer_group!r}, and this "
                f"frame names {producer_group!r}; name the group that the transaction began with"
            )
        part = transaction.parts.get(partition.id)
        last = part.last if part is not None else 0
        if frame.first + frame.count - 1 > last:
            if frame.previous != last or frame.first <= last:
                raise OutOfSequence(
                    f"row {frame.first} of transaction {frame.producer:016x} follows row {frame.previous}, but the "
                    f"last row stored in {partition.row.name!r} is {last}; send the rows between",
                    last=last,
                )
            self._refuse_closed(partition.row.name)
            self._check_room(transaction, frame)
            self._catalog.spend_rate(partition, frame)
            try:
                log.place_for(frame.size)
            except OSError as error:
                raise turn.disk_error(error) from error
            self._publisher.append(transaction, partition, frame)
            self.on_stored(transaction)
        turn.answer_after_commit(lambda: reply(None, None))

    def _undecided(self, number: int) -> StoredTransaction:
        """The transaction, if it still accepts rows; raises if it is decided or unknown."""
        transaction = self.table.live.get(number)
        if transaction is None or transaction.state == COMMITTED:
            raise self._unknown(number)
        return transaction

    def _unknown(self, number: int) -> PlaitError:
        """The error for a request about a transaction that is not open."""
        committed = True if number in self.table.live else self.table.decided.get(number)
        name = name_of(number)
        if committed is None:
            return TransactionNotFound(
                f"transaction {name} is not known: it was decided long ago, or no message of it is stored; "
                "begin another one",
                transaction=name,
            )
        outcome = "committed" if committed else "rolled back"
        return TransactionDecided(
            f"transaction {name} was {outcome} before, which is final; begin another one to send more messages",
            transaction=name,
            outcome=outcome,
        )

    def _check_room(self, transaction: StoredTransaction, frame: FrameView) -> None:
        limits, table = self._turn.limits, self.table
        rows, size = transaction.rows + frame.count, transaction.size + frame.size
        _check_limit("messages in this transaction", "transaction_rows", rows, limits.transaction_rows)
        _check_limit("bytes in this transaction", "transaction_bytes", size, limits.transaction_bytes)
        _check_limit("messages in all transactions", "half_rows", table.rows + frame.count, limits.half_rows)
        _check_limit("bytes in all transactions", "half_bytes", table.size + frame.size, limits.half_bytes)

    def decide(self, number: int, *, commit: bool, rows: int | None = None) -> None:
        """Commit or roll back a transaction. Idempotent; takes effect with the next commit.

        With ``rows``, a transaction that does not have exactly this number of rows is not committed.
        """
        self._turn.refuse_when_stalled()
        transaction = self.table.live.get(number)
        if transaction is None or transaction.state == COMMITTED:
            if transaction is None and self.table.decided.get(number) is not commit:
                raise self._unknown(number)
            if transaction is not None and not commit:
                raise self._unknown(number)
            return
        if commit and rows is not None and rows != transaction.rows:
            name = name_of(number)
            raise TransactionIncomplete(
                f"transaction {name} has {transaction.rows} messages here, not {rows}: the others were lost before "
                "they were durable; roll it back, and send them in another transaction",
                transaction=name,
            )
        self._turn.record(TransactionCommitted(number) if commit else TransactionRolledBack(number))
        self._decided(transaction, commit=commit)

    def _decided(self, transaction: StoredTransaction, *, commit: bool) -> None:
        """Apply a decision, when it is made or in replay."""
        if commit and transaction.parts:
            transaction.state, transaction.check_at = COMMITTED, 0.0
            self.table.dirty = True
            self._publisher.add(transaction)
        else:
            self.table.decide(transaction.id, committed=commit)

    def check(self, transaction: StoredTransaction) -> None:
        """Record that a producer is asked for the outcome."""
        transaction.checks += 1
        self.table.dirty = True
        self._turn.record(TransactionChecked(transaction.id, transaction.checks))

    def park(self, transaction: StoredTransaction) -> None:
        """Ask no producer again: the transaction waits for an operator."""
        transaction.state, transaction.check_at = PARKED, 0.0
        self.table.dirty = True
        self._turn.record(TransactionParked(transaction.id))

    # --- recovery -------------------------------------------------------------------------------

    def replay(self, partition: Partition, frame: FrameView) -> None:
        """Replay a frame of a half partition."""
        number, table = frame.producer, self.table
        transaction = table.live.get(number)
        if transaction is None:
            if number in table.decided:
                return
            transaction = table.begin(number, producer_group_of(frame), frame.store_time)
        table.stored(transaction, partition.id, HalfFrame(frame.first, frame.base, frame.count, frame.size))

    def replay_copy(self, schedule: Partition, frame: FrameView) -> None:
        """Replay a frame of a schedule that may be a copy of half messages."""
        transaction, half = self.table.live.get(frame.producer), self._by_name.get(schedule.row.name)
        if transaction is None or half is None or frame.has(Column.SCHEDULE):
            return
        transaction.state = COMMITTED
        self.table.published(transaction, half.id, frame.first + frame.count - 1)

    def replay_event(self, event: TransactionEvent) -> None:
        """Replay an event of the action log."""
        transaction = self.table.live.get(event.transaction)
        if isinstance(event, TransactionCommitted | TransactionRolledBack):
            committed = isinstance(event, TransactionCommitted)
            if transaction is None or not committed:
                self.table.decide(event.transaction, committed=committed)
            else:
                transaction.state = COMMITTED
        elif transaction is not None and isinstance(event, TransactionChecked):
            transaction.checks = max(transaction.checks, event.count)
        elif transaction is not None and transaction.state != COMMITTED:
            transaction.state = PARKED
        self.table.dirty = True

    def recovered(self, *, uncertain: bool) -> None:
        """Finish recovery after the logs were replayed: publish what is committed, check what is not decided.

        ``uncertain``: no checkpoint was readable, so decisions may be lost. An operator decides then.
        """
        # A checkpoint copies the table first, so it may have rows of subjects that were deleted before it ended.
        for number in {number for each in self.table.live.values() for number in each.parts}:
            if number not in self._catalog.partitions:
                self.table.drop_partition(number)
        for transaction in list(self.table.live.values()):
            if transaction.state == COMMITTED:
                self._decided(transaction, commit=True)
            elif uncertain:
                transaction.state = PARKED
                self.table.dirty = True
                self._schedules.notice(
                    f"no checkpoint is readable: transaction {name_of(transaction.id)} is parked, because its "
                    "decision may be lost"
                )
        first = self.table.first_rows()
        for partition in self._by_name.values():
            partition.start = min(partition.start, first.get(partition.id, partition.next))


def producer_group_of(frame: FrameView) -> str:
    """The producer group in the note of a frame of half messages."""
    try:
        return names.check_group(bytes(frame.stored(Column.NOTE)).decode("ascii"))
    except (UnicodeDecodeError, InvalidArgument) as error:
        raise FrameError(f"the note of half messages is no producer group: {error}") from None


def _check_limit(what: str, limit: str, value: int, most: int) -> None:
    if value > most:
        raise LimitExceeded(
            f"too many {what}: {value} (limit `{limit}` of the broker: {most}); use smaller transactions, decide "
            "parked ones ('plait transactions list'), or raise the limit",
            limit=limit,
            value=most,
        )


def name_of(number: int) -> str:
    """The transaction's id as users see it."""
    return f"{number:016x}"
