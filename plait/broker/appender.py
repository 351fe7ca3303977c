"""The frames that one loop turn appends: those of producers to the message log, and events to the action log.

Each frame of a producer is classified (new, duplicate, out of sequence). Small adjacent frames are joined into one
frame, stamped and appended together. Memory changes only after the log has reserved space for the frames.
"""

from __future__ import annotations

import struct
from functools import reduce
from operator import attrgetter, or_
from typing import Final

import msgspec
from msgspec.structs import astuple

from plait.broker.commit import Commit, SendCallback
from plait.broker.partition_rate import PartitionRate
from plait.broker.partitions.partition import Partition, ReadBatch
from plait.errors import FlowControl, OutOfSequence, PlaitError, ProducerConflict, StaleRoute, UnknownProducer
from plait.frame.builder import Buffer, FrameParts, build_bodies, pack_stamp
from plait.frame.coalesce import can_coalesce, coalesce
from plait.frame.columns import FIXED_WIDTHS, Column
from plait.frame.header import FLAG_FORWARDED, FLAG_UNSEQUENCED, HEADER_SIZE, STAMP_OFFSET
from plait.frame.view import FrameView
from plait.storage.catalog import FORWARD, SCHEDULE, STAGE
from plait.storage.logs.action_events import ATTEMPT_MAX, EVENT_SIZE, DeliveryEvent, Event
from plait.storage.logs.action_log import DEFINITIONS, DEFINITIONS_MAX, EVENTS, EVENTS_MAX, Definition
from plait.storage.logs.frame_traits import TRAIT_COLUMNS, traits_of
from plait.storage.logs.log import Log
from plait.storage.producers import SHARDS, FrameVerdict, ProducerTable, StoredRun

#: The largest joined frame: slicing rows from a larger one costs readers too much.
JOINED_SIZE_MAX = 256 * 1024
#: Waiting pulls get a frame up to this size from the memory in which it arrived, larger ones from the log.
NEWEST_SIZE_MAX = 4 * 1024
#: Bytes per row that constant columns can grow to when frames are joined.
CONSTANTS_SIZE_MAX = sum(FIXED_WIDTHS.values())

#: At least the bytes that an event takes in a frame with its offset, or a definition besides its encoding, with a share
#: of the frame's header; and of the first frame of each kind.
_EVENT_BOUND = EVENT_SIZE + 5
_DEFINITION_BOUND = 9
FIRST_FRAMES_BOUND = 512
_encode = msgspec.msgpack.Encoder().encode
_frame_size = attrgetter("size")

#: Bound once: Python 3.11 calls a function for each access to an enum member.
_NEW: Final = FrameVerdict.NEW


class Submission(msgspec.Struct, eq=False):
    """A received frame that is not yet appended."""

    frame: FrameView
    reply: SendCallback | None


class Appender:
    """Appends the submissions of a loop turn; has no state of its own between turns."""

    def __init__(self, log: Log, producers: ProducerTable) -> None:
        self._log = log
        self._producers = producers

    def append(self, partition: Partition, submissions: list[Submission], epoch: int, now: int, commit: Commit) -> None:
        """Store the new frames. Raises OSError when the log cannot grow; the frames before that one are stored."""
        if partition.row.kind == STAGE:
            for submission in submissions:
                self._stage(partition, submission, epoch, now, commit)
            return
        if len(submissions) == 1:
            self._store(partition, submissions, epoch, now, commit)
            return
        run: list[Submission] = []
        run_size = 0
        for submission in submissions:
            frame = submission.frame
            # Delayed rows are located one by one, so a run table in a schedule partition needs one entry per row.
            joinable = can_coalesce(frame) and (frame.count == 1 or not partition.row.kind)
            if run and (
                not joinable
                or frame.column_bits != run[0].frame.column_bits
                or frame.flags != run[0].frame.flags
                or run_size + frame.size > JOINED_SIZE_MAX
            ):
                self._store(partition, run, epoch, now, commit)
                run, run_size = [], 0
            run.append(submission)
            run_size += frame.size
            if not joinable:
                self._store(partition, run, epoch, now, commit)
                run, run_size = [], 0
        if run:
            self._store(partition, run, epoch, now, commit)

    def _store(self, partition: Partition, run: list[Submission], epoch: int, now: int, commit: Commit) -> None:
        bound = run[0].frame.size
        if len(run) > 1:
            # A joined frame has one header and a run table; a constant column is expanded to one value per row.
            bound = 256 + sum(s.frame.size + 64 + CONSTANTS_SIZE_MAX * s.frame.count for s in run)
        if self._log.end + bound > self._log.room_end:
            self._log.place_for(bound)
        base = partition.next
        # A schedule accepts the same LPs as its partition. After a seal it gets no new rows of the LP (R25).
        main = partition.main or partition
        new: list[Submission] = []
        end = base
        for submission in run:
            frame = submission.frame
            sequenced = not frame.flags & FLAG_UNSEQUENCED
            if sequenced:
                verdict = self._producers.judge(frame.producer, partition.id, frame.first, frame.count, frame.previous)
                if verdict is not _NEW:
                    sequence, error = self._resend_or_refusal(partition, frame, verdict)
                    if submission.reply is not None:
                        commit.replies.append((submission.reply, sequence, error))
                    continue
            if main.accepts is not None and not main.takes(frame):
                if submission.reply is not None:
                    commit.replies.append((submission.reply, None, self._stale_route(partition, frame)))
                continue
            if main.send_rate is not None and _over_rate(main, main.send_rate, submission, commit):
                continue
            if sequenced:
                self._producers.stored(
                    frame.producer, partition.id, frame.first, frame.count, frame.previous, end, now, frame.crc
                )
            new.append(submission)
            if submission.reply is not None:
                commit.replies.append((submission.reply, end, None))
            end += frame.count
        if not new:
            return
        stamp = pack_stamp(partition.id, base, now, self._log.durable, epoch)
        parts: list[Buffer]
        frame = new[0].frame
        if len(new) == 1:
            buffer = frame.buffer
            size = len(buffer)
            parts = [buffer[:STAMP_OFFSET], stamp, buffer[HEADER_SIZE:]]
            if size <= NEWEST_SIZE_MAX and (partition.waiting or partition.readers):
                whole = [(base, end)]
                commit.newest[partition] = ReadBatch(end, False, parts, whole, end - base, size, frame.inflated_size)
        else:
            joined = coalesce([s.frame for s in new])
            joined.stamp_with(stamp)
            parts, size = joined.parts, joined.size
        traits = reduce(or_, [traits_of(s.frame) for s in new]) if frame.column_bits & TRAIT_COLUMNS else 0
        offset = self._log.append(parts, size)
        partition.appended(base, offset, now, size, end - base, epoch, traits)
        commit.partitions[partition] = end
        if partition.row.kind:
            if len(new) > 1:
                frame = FrameView(joined.tobytes())
            commit.delayed.append((partition, frame, offset, base))

    def _stage(self, partition: Partition, submission: Submission, epoch: int, now: int, commit: Commit) -> None:
        """Store a frame of a stage. A stage has one producer, which numbers its rows from 1 without gaps.

        Frames are not joined, so that they can be published unchanged.
        """
        frame, sequence, error = submission.frame, partition.next, None
        if frame.first == sequence + 1:
            self.copy(partition, frame, epoch, now, commit)
        elif frame.first + frame.count - 1 <= sequence:
            sequence = frame.first - 1
            error = self._other_stage_rows(partition, frame)
        else:
            error = OutOfSequence(
                f"stage row {frame.first} does not follow row {sequence}, the last one stored; send the rows between",
                last=sequence,
            )
        if submission.reply is not None:
            commit.replies.append((submission.reply, None if error else sequence, error))

    def _other_stage_rows(self, partition: Partition, frame: FrameView) -> PlaitError | None:
        """The error for a frame whose row numbers are stored; None when the stored frame is the same one."""
        stored = partition.frame_from(self._log, frame.first - 1)
        if stored is None:
            return FlowControl("the stored rows of this stage are not readable yet; send the frame again")
        if stored.count == frame.count and stored.crc == frame.crc_following(stored.previous):
            return None
        return _conflict(partition, frame)

    def copy(self, partition: Partition, frame: FrameView, epoch: int, now: int, commit: Commit) -> int:
        """Append a stored frame to this partition, unchanged except for its stamp. Returns the offset."""
        self._log.place_for(frame.size)
        base = partition.next
        stamp = pack_stamp(partition.id, base, now, self._log.durable, epoch)
        buffer = frame.buffer
        offset = self._log.append([buffer[:STAMP_OFFSET], stamp, buffer[HEADER_SIZE:]], frame.size)
        partition.appended(base, offset, now, frame.size, frame.count, epoch, traits_of(frame))
        commit.partitions[partition] = partition.next
        if partition.row.kind == SCHEDULE:
            commit.delayed.append((partition, frame, offset, base))
        return offset

    def _stale_route(self, partition: Partition, frame: FrameView) -> PlaitError:
        """The error for keys that the partition does not accept.

        It has the producer's last stored sequence, because the sender sends every later row elsewhere (R8).
        """
        window = self._producers.window(frame.producer, partition.id)
        return StaleRoute(
            f"partition {partition.row.name!r} does not take these keys; refresh the route",
            last=window.last if window else 0,
            version=(partition.main or partition).row.route,
        )

    def _resend_or_refusal(
        self, partition: Partition, frame: FrameView, verdict: FrameVerdict
    ) -> tuple[int | None, PlaitError | None]:
        """The reply to a frame that is not new: the sequence of the stored rows if it is a resend, else the error."""
        window = self._producers.window(frame.producer, partition.id)
        if verdict is FrameVerdict.DUPLICATE:
            run = self._producers.find(frame.producer, partition.id, frame.first, frame.count)
            if run is not None and self._same(run, frame):
                return run.base, None
        if window is not None and window.overlaps(frame.first, frame.first + frame.count - 1):
            return None, _conflict(partition, frame)
        if verdict is not FrameVerdict.GAP:
            # The producer is unknown, or the window no longer holds these rows, so they cannot be compared.
            return None, UnknownProducer(
                f"producer {frame.producer:016x} is not known for {partition.row.subject!r}: it was idle for too long; "
                "its unanswered sends may or may not be stored"
            )
        last = window.last if window else 0
        return None, OutOfSequence(
            f"row {frame.first} of producer {frame.producer:016x} follows row {frame.previous}, but the last row "
            f"stored in {partition.row.subject!r} is {last}; send the rows between",
            last=last,
        )

    @staticmethod
    def _same(run: StoredRun, frame: FrameView) -> bool:
        """Whether the frame equals the stored one. A resend may name another predecessor (``previous``)."""
        return frame.crc_following(run.previous) == run.crc


class ActionBuffer:
    """Events and definitions that are not yet in the log."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._definitions: list[bytes] = []
        #: Frames for the log, made by ``build_frames``; the caller that appends them empties the list.
        self.frames: list[FrameParts] = []
        #: The bytes of all frames of the content are at most ``size`` + ``FIRST_FRAMES_BOUND``; 0: the buffer is empty.
        self.size = 0

    def event(self, event: Event, group: int, epoch: int) -> None:
        try:
            row = event.layout.pack(group, epoch, event.action, *astuple(event))
        except struct.error:
            assert isinstance(event, DeliveryEvent)
            event.attempt = min(event.attempt, ATTEMPT_MAX)
            row = event.layout.pack(group, epoch, event.action, *astuple(event))
        self._events.append(row)
        self.size += _EVENT_BOUND

    def define(self, definition: Definition) -> None:
        row = _encode(definition)
        self._definitions.append(row)
        self.size += len(row) + _DEFINITION_BOUND

    def build_frames(self, index: int, ends: tuple[int, int], epoch: int, time: int) -> int:
        """Put the buffered definitions, then the events, into ``frames``, numbered from ``index``. Returns the number
        of the next frame.

        The events depend on the message log and on the retained log up to the two offsets in ``ends``.
        """
        message_end, retained_end = ends
        self.size = sum(map(_frame_size, self.frames))
        for kind, rows, rows_max in (
            (DEFINITIONS, self._definitions, DEFINITIONS_MAX),
            (EVENTS, self._events, EVENTS_MAX),
        ):
            if not rows:
                continue
            producer = retained_end if kind == EVENTS else 0
            for start in range(0, len(rows), rows_max):
                stamp = pack_stamp(kind, index, time, message_end, epoch)
                part = rows[start : start + rows_max]
                frame = build_bodies(part, producer=producer, first=index, stamp=stamp)
                self.frames.append(frame)
                self.size += frame.size
                index += 1
        self._definitions, self._events = [], []
        return index


def _over_rate(partition: Partition, rate: PartitionRate, submission: Submission, commit: Commit) -> bool:
    """Refuse a frame because of the subject's rate, or count it. Frames of other brokers were counted there."""
    frame = submission.frame
    if frame.flags & FLAG_FORWARDED:
        return False
    refusal = rate.refusal(partition.row.subject, commit.since)
    if refusal is None:
        rate.spend(frame.count, frame.size)
        return False
    if submission.reply is not None:
        commit.replies.append((submission.reply, None, refusal))
    return True


def _conflict(partition: Partition, frame: FrameView) -> ProducerConflict:
    return ProducerConflict(
        f"some of the rows {frame.first} to {frame.first + frame.count - 1} of producer {frame.producer:016x} are "
        f"stored in {partition.row.subject!r} with other contents: another process uses this producer id; "
        "nothing of this send was stored",
        producer=f"{frame.producer:016x}",
        first=frame.first,
    )


def replay_producers(partition: Partition, producers: ProducerTable, offset: int, frame: FrameView) -> None:
    """Apply a frame of the message log to the producer table, with the same effect as its append."""
    if frame.flags & FLAG_UNSEQUENCED or partition.row.kind == FORWARD:
        return
    if not frame.has(Column.RUNS) or frame.flags & FLAG_FORWARDED:
        runs = [(frame.producer, frame.first, frame.count, frame.crc, frame.previous)]
    else:
        runs = frame.runs().tolist()
    base = frame.base
    for producer, first, rows, crc, previous in runs:
        if offset >= producers.loaded_until[producer % SHARDS]:
            producers.stored(producer, partition.id, first, rows, previous, base, frame.store_time, crc)
        base += rows
