"""Replays messages of a history: in order, at a rate, marked with headers, and resumable.

Rows are sent in the order of ``storage_order``, one batch after another: a batch is sent when the one before it is
stored. So the messages of each key keep the order in which they were stored.

Promise, with a state file: whenever the process is killed and started again, every message of the selection is stored
again, and none twice, as long as the target's partitions are the same as before and the broker remembers the producer
(a week). Otherwise at most the one batch that was in doubt is stored twice. Without a state file a second run starts
from the beginning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from plait import chance
from plait.client.arguments import limit_of
from plait.client.client import Client
from plait.client.send.encoding import encode_group, encode_headers, encode_tags
from plait.client.send.open_rows import hash_keys
from plait.client.send.resumable_sender import ResumableSender
from plait.client.send.row_columns import RowColumns
from plait.clock import Clock, SystemClock
from plait.errors import InvalidArgument, TooLarge
from plait.frame.header_block import decode_headers
from plait.limits import MIB
from plait.model import names
from plait.spark.history.lookup import History
from plait.spark.history.pieces import ENCODED
from plait.spark.history.replay_state import InDoubt, ReplayMark, ReplayState, StateFile
from plait.spark.history.selection import HistorySelection
from plait.spark.runtime.job_runner import NoProgress, ProgressListener

log = logging.getLogger("plait.spark")

#: Headers of replayed messages: the id of the original message, and the name of the replay.
REPLAYED_FROM: Final = "plait-replayed-from"
REPLAY: Final = "plait-replay"
#: Rows and bytes of a batch: few, since a batch in doubt may be stored twice, and enough that waiting for each batch
#: costs little.
BATCH_COUNT: Final = 1_000
BATCH_SIZE: Final = MIB
#: Up to this many keys are counted exactly: 8 MiB of hashes.
KEYS_EXACT_MAX: Final = 1 << 20
#: With a rate, the maximum of batches per second.
BATCHES_PER_SECOND: Final = 10


class Replayed(NamedTuple):
    """The result of a replay."""

    run: str
    #: Messages that this process stored again, and those that earlier processes did.
    sent: int
    before: int


class Counted(NamedTuple):
    """The messages that a replay would send."""

    messages: int
    size: int
    #: Distinct keys: exact up to a million, and within a percent beyond that.
    keys: int
    #: Store times.
    first: datetime | None
    last: datetime | None


class Replay:
    """Sends a selection to a subject, once.

    ``state`` is the file that makes it resumable. ``requested`` has the user's arguments as they were written, since
    "-5m" is another time a minute later: a process that resumes the replay must have the same arguments.
    """

    def __init__(
        self,
        history: History,
        selection: HistorySelection,
        to: str,
        *,
        rate: float | None = None,
        limit: int | None = None,
        state: Path | None = None,
        requested: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if rate is not None and not 0 < rate < float("inf"):
            raise InvalidArgument(f"invalid rate {rate}; give messages per second, more than 0")
        self._history = history
        self._selection = selection
        self._to = names.check("subject", to)
        self._rate = rate
        self._limit = None if limit is None else limit_of(limit)
        self._state_path = state
        self._requested = dict(requested or {})
        self._clock = clock or SystemClock()
        self._sleep = sleep

    def count(self, progress: ProgressListener | None = None) -> Counted:
        """Count what a run would send, and send nothing."""
        count = size = 0
        keys = KeyCount()
        first = last = None
        for rows in self._rows(self._begun(""), progress or NoProgress(), {}):
            count += rows.num_rows
            size += pc.sum(pc.binary_length(rows["body"])).as_py()
            keys.add(rows["key"])
            first = first or rows["store_time"][0].as_py()
            last = rows["store_time"][-1].as_py()
        return Counted(count, size, keys.count, first, last)

    async def run(self, client: Client, progress: ProgressListener | None = None) -> Replayed:
        """Send the messages that earlier processes with the same state file did not send."""
        file = StateFile(self._state_path)
        try:
            return await self._run(client, file, progress or NoProgress())
        finally:
            file.close()

    async def _run(self, client: Client, file: StateFile, progress: ProgressListener) -> Replayed:
        request = self._request()
        state = file.load(request) or self._begun(chance.token(8))
        sender = ResumableSender(client, self._to)
        await sender.open()
        state = file.same_cluster(state, sender.servers)
        before = state.count
        if state.finished:
            return Replayed(state.run, 0, before)
        due = 0.0
        ends = dict(state.ends or {})
        batches = _Batches(self._rows(state, progress, ends), self._batch_count())
        if state.in_doubt is not None:
            state = await self._settle(sender, batches, state)
        while (rows := await asyncio.to_thread(batches.next)) is not None:
            if state.ends is None:
                # The scan has called ``found`` with all rows before the first batch.
                state = msgspec.structs.replace(state, ends=dict(ends))
            # After a slow read or a stall, the replay does not send faster to catch up: the rate is there to prevent
            # bursts.
            due = max(due, self._clock.monotonic())
            prepared = sender.prepare(*_outgoing(rows, state.run))
            doubt = InDoubt(rows.num_rows, prepared.digest)
            file.save(msgspec.structs.replace(state, position=sender.position, in_doubt=doubt))
            await sender.send(prepared)
            state = _advanced(state, rows)
            progress.update(state.count)
            if self._rate is not None:
                due += rows.num_rows / self._rate
                await self._sleep(max(due - self._clock.monotonic(), 0.0))
        file.save(msgspec.structs.replace(state, position=None, in_doubt=None, finished=True))
        return Replayed(state.run, state.count - before, before)

    async def _settle(self, sender: ResumableSender, batches: _Batches, state: ReplayState) -> ReplayState:
        """Resend the batch that was in doubt, with its old producer sequences."""
        assert state.in_doubt is not None
        assert state.position is not None
        rows = await asyncio.to_thread(batches.next, state.in_doubt.count)
        if rows is None:
            return state
        prepared = sender.prepare(*_outgoing(rows, state.run))
        if prepared.digest == state.in_doubt.digest:
            sender.resume_at(state.position)
        else:
            log.warning(
                "the partitions of %s, or the messages to be sent, have changed: up to %d messages may be stored twice",
                self._to,
                state.in_doubt.count,
            )
        await sender.send(prepared)
        return _advanced(state, rows)

    def _request(self) -> dict[str, Any]:
        """The arguments that identify a replay."""
        selection = self._selection
        return {
            **self._history.sources,
            "subject": selection.subject,
            "key": selection.key,
            "id": selection.message_id,
            "headers": [list(header) for header in selection.headers],
            "to": self._to,
            "limit": self._limit,
            **self._requested,
        }

    def _batch_count(self) -> int:
        if self._rate is None:
            return BATCH_COUNT
        return max(1, min(BATCH_COUNT, int(self._rate / BATCHES_PER_SECOND)))

    def _begun(self, run: str) -> ReplayState:
        """The state of a new replay."""
        selection = self._selection
        return ReplayState(run=run, request=self._request(), time_min=selection.time_min, time_max=selection.time_max)

    def _rows(self, state: ReplayState, progress: ProgressListener, ends: dict[str, ReplayMark]) -> Iterator[pa.Table]:
        """The rows that are left to send. For a new replay, ``ends`` gets the last message of each partition."""

        def found(rows: pa.Table) -> None:
            _extend(ends, rows)

        def reading(done: int, total: int) -> None:
            if not begun:
                begun.append(total)
                progress.step("reading", total, "bytes")
            progress.update(done)

        def counted(count: int) -> None:
            progress.step("sending", count if self._limit is None else min(count, self._limit))

        begun: list[int] = []
        selection = self._selection._replace(time_min=state.time_min, time_max=state.time_max)
        left = self._limit
        first = found if state.ends is None else None
        for each in self._history.scan(selection, progress=reading, counted=counted, found=first, encoded=True):
            # A replay into the subject that it reads must not send its own messages.
            runs = pc.map_lookup(each["headers"], REPLAY, "last")
            rows = each.filter(pc.invert(pc.fill_null(pc.equal(runs, state.run), False)))
            if state.ends is not None:
                # Only the rows that existed when the replay began.
                rows = rows.filter(_within(rows, state.ends))
            if left is not None:
                rows = rows.slice(0, left)
                left -= rows.num_rows
            # Without the rows that are already stored again.
            rows = rows.filter(pc.invert(_within(rows, state.marks)))
            if rows.num_rows:
                yield rows
            if left == 0:
                return


class KeyCount:
    """Counts distinct keys in bounded memory: estimates the density of all hashes from the least of them.

    Exact for fewer than ``exact_max`` keys; beyond that the error is about 1 / sqrt(exact_max) of the count.
    """

    def __init__(self, exact_max: int = KEYS_EXACT_MAX) -> None:
        self._exact_max = exact_max
        self._least = np.zeros(0, np.uint64)
        self._new: list[npt.NDArray[np.uint64]] = []
        self._new_count = 0

    def add(self, keys: pa.ChunkedArray) -> None:
        """Add the keys of some rows; null: no key."""
        found = keys.unique().drop_null()
        self._new.append(hash_keys(found.to_pylist(), len(found)))
        self._new_count += len(found)
        if self._new_count >= self._exact_max:
            self._merge()

    def _merge(self) -> None:
        self._least = np.unique(np.concatenate([self._least, *self._new]))[: self._exact_max]
        self._new, self._new_count = [], 0

    @property
    def count(self) -> int:
        self._merge()
        if len(self._least) < self._exact_max:
            return len(self._least)
        return round((self._exact_max - 1) / (int(self._least[-1]) / 2**64))


class _Batches:
    """Splits rows into batches. The end of a batch depends on its rows alone, not on the tables that they come in."""

    def __init__(self, tables: Iterator[pa.Table], count_max: int) -> None:
        self._tables = tables
        self._count_max = count_max
        self._rest: pa.Table | None = None

    def next(self, count: int | None = None) -> pa.Table | None:
        """The next batch, or the next ``count`` rows if there are as many; None: no rows are left."""
        wanted = count or self._count_max
        rest = self._rest
        while rest is None or rest.num_rows < wanted:
            more = next(self._tables, None)
            if more is None:
                break
            rest = more if rest is None else pa.concat_tables([rest, more])
        if rest is None or not rest.num_rows:
            return None
        head = rest.slice(0, wanted)
        if count is None:
            sizes = pc.cumulative_sum(pc.binary_length(head["body"]).cast(pa.int64()))
            head = head.slice(0, max(1, pc.sum(pc.less_equal(sizes, BATCH_SIZE)).as_py()))
        self._rest = rest.slice(head.num_rows)
        return head


def _within(rows: pa.Table, marks: dict[str, ReplayMark]) -> pa.Array | pa.ChunkedArray:
    """Whether each row is at or before the mark of its partition, by sequence and by time.

    By both, since the sequences of a subject that was deleted and created again restart at 0.
    """
    times = rows["store_time"].cast(pa.int64())
    within: pa.Array | pa.ChunkedArray = pa.array(np.zeros(rows.num_rows, bool))
    for partition, mark in marks.items():
        here = pc.and_(
            pc.equal(rows["partition"], partition),
            pc.and_(pc.less_equal(rows["sequence"], mark.sequence), pc.less_equal(times, mark.time)),
        )
        within = pc.or_(within, here)
    return within


def _extend(marks: dict[str, ReplayMark], rows: pa.Table) -> None:
    """Move the marks forward so that they include these rows."""
    times = rows["store_time"].cast(pa.int64())
    ends = pa.table({"partition": rows["partition"], "sequence": rows["sequence"], "time": times})
    for end in ends.group_by("partition").aggregate([("sequence", "max"), ("time", "max")]).to_pylist():
        before = marks.get(end["partition"], ReplayMark(-1, -1))
        marks[end["partition"]] = ReplayMark(
            max(before.sequence, end["sequence_max"]), max(before.time, end["time_max"])
        )


def _advanced(state: ReplayState, rows: pa.Table) -> ReplayState:
    """The state after rows were stored."""
    marks = dict(state.marks)
    _extend(marks, rows)
    return msgspec.structs.replace(state, count=state.count + rows.num_rows, marks=marks, position=None, in_doubt=None)


def _outgoing(rows: pa.Table, run: str) -> tuple[RowColumns, list[str]]:
    """Rows as they are sent, unchanged except for the headers of a replay; and their message ids."""
    ids = rows["message_id"].to_pylist()
    headers = [
        _marked(known, texts, message_id, run)
        for known, texts, message_id in zip(rows[ENCODED].to_pylist(), rows["headers"].to_pylist(), ids, strict=True)
    ]
    keys = rows["key"].fill_null("").to_pylist()
    tags = [encode_tags(tags) for tags in rows["tags"].to_pylist()]
    groups = [encode_group(group) for group in rows["to_group"].to_pylist()]
    columns = RowColumns(
        rows["body"].combine_chunks(),
        pa.array(keys, pa.string()) if any(keys) else None,
        hash_keys(keys, len(keys)) if any(keys) else None,
        pa.array(tags, pa.binary()) if any(tags) else None,
        pa.array(headers, pa.binary()),
        groups=pa.array(groups, pa.binary()) if any(groups) else None,
    )
    return columns, ids


def _marked(encoded: bytes | None, texts: list[tuple[str, str]] | None, message_id: str, run: str) -> bytes:
    headers: dict[str, Any] = dict(texts or []) if encoded is None else dict(decode_headers(encoded))
    headers |= {REPLAYED_FROM: message_id, REPLAY: run}
    try:
        return encode_headers(headers)
    except TooLarge as error:
        raise TooLarge(f"message {message_id} cannot be sent again: with the headers of a replay, {error}") from None
