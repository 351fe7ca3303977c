"""Defects that the rules of the design (R1 and so on) prevent. When one is patched in, a test must fail."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from plait.broker.appender import ActionBuffer, Appender
from plait.broker.broker import Broker
from plait.broker.commit import SyncWork
from plait.broker.groups.attachments import Attachments
from plait.broker.groups.dead_letters import DeadLetters
from plait.broker.groups.shared_group import SharedGroup
from plait.broker.partitions.partition import SHARDS, LogPositions, Partition
from plait.broker.query import search
from plait.broker.query.message_index import MessageIndex
from plait.broker.recovery import checkpointer as snapshot
from plait.broker.recovery import replay as recover
from plait.broker.recovery.segment_headers import SegmentHeaders
from plait.broker.retention import Retention
from plait.broker.schedule.bucketed import BucketedRows
from plait.broker.turn import Turn
from plait.frame.view import FrameView
from plait.storage import checkpoint, marks
from plait.storage.cursor import Cursor
from plait.storage.disk import Disk
from plait.storage.logs import recovery
from plait.storage.logs.log import Log
from plait.storage.logs.recovery import LogScan
from plait.storage.logs.segment import Segment, SegmentFiles
from plait.storage.producers import FrameVerdict, ProducerTable

Patch = pytest.MonkeyPatch

# --- positions and visibility -------------------------------------------------------------------


def touch_everything(patch: Patch) -> None:
    """R1: every checkpoint writes every shard."""
    commit = Turn.commit

    def naive(self: Turn) -> None:
        commit(self)
        self.dirty_shards.update(range(SHARDS))

    patch.setattr(Turn, "commit", naive)


def remember_every_sequence(patch: Patch) -> None:
    """R1: a position is a list of sequences."""

    def naive(self: SharedGroup, consumer: int, start: int, end: int) -> None:
        cursor = self.cursor
        cursor.next = max(cursor.next, end)
        for sequence in range(start, end):
            cursor.returned.remove(sequence, sequence + 1)
            cursor.held[consumer].add(sequence, sequence + 1, sequence)

    patch.setattr(SharedGroup, "_acked", naive)


def finish_before_the_sync(patch: Patch) -> None:
    """R2: written rows are acknowledged before their sync, even with ``flush="sync"``."""
    commit = Turn.commit

    def naive(self: Turn) -> None:
        commit(self)
        while self.unsynced:
            written = self.unsynced.popleft()
            self._make_visible(written)
            self._answer(written)

    patch.setattr(Turn, "commit", naive)


def write_messages_last(patch: Patch) -> None:
    """R2: with ``flush="async"`` pulls are served and sends acknowledged before the message log is written."""
    commit, write = Turn.commit, Log.write

    def naive(self: Turn) -> None:
        commit(self)
        write(self.message_log)

    def of_other_logs(self: Log) -> None:
        if self.directory != "message":
            write(self)

    patch.setattr(Turn, "commit", naive)
    patch.setattr(Log, "write", of_other_logs)


def presume_nothing(patch: Patch) -> None:
    """R3: an event is replayed whether or not its messages were recovered."""
    build_frames = ActionBuffer.build_frames

    def naive(self: ActionBuffer, index: int, ends: tuple[int, int], epoch: int, time: int) -> int:
        return build_frames(self, index, (0, ends[1]), epoch, time)

    patch.setattr(ActionBuffer, "build_frames", naive)
    patch.setattr(Partition, "stored_until", lambda self, epoch: 1 << 60)


def presume_nothing_kept(patch: Patch) -> None:
    """R3: an event is replayed whether or not its rows in the retained log were recovered."""
    patch.setattr("plait.broker.recovery.start_up.presumed_retained", lambda frame: 0)


def take_a_lost_life_for_a_clean_stop(patch: Patch) -> None:
    """R3: a start after a clean stop leaves no mark, so a crash after it looks like the clean stop."""

    def naive(self: Broker) -> Any:
        report = self.recover()
        self.message_log.on_segment = self.segment_headers.of_message_segment
        self.action_log.on_segment = self.segment_headers.of_action_segment
        if not report.clean:
            self.snapshots.make()
        return report

    patch.setattr(Broker, "start", naive)


# --- idempotent sends ---------------------------------------------------------------------------


def store_whatever_is_newer(patch: Patch) -> None:
    """R7: a frame is new when its producer sequence is higher than the last."""

    def naive(
        self: ProducerTable, producer: int, partition: int, first: int, count: int, previous: int
    ) -> FrameVerdict:
        window = self.window(producer, partition)
        return FrameVerdict.NEW if window is None or first > window.last else FrameVerdict.DUPLICATE

    patch.setattr(ProducerTable, "judge", naive)


def believe_numbers_alone(patch: Patch) -> None:
    """R7: rows with stored producer sequences are duplicates, even with other contents."""
    patch.setattr(Appender, "_same", staticmethod(lambda run, frame: True))


def forget_runs(patch: Patch) -> None:
    """R7: after a start, only the first producer of a joined frame is known."""

    def naive(partition: Partition, producers: ProducerTable, offset: int, frame: Any) -> None:
        producers.stored(
            frame.producer,
            partition.id,
            frame.first,
            frame.count,
            frame.previous,
            frame.base,
            frame.store_time,
            frame.crc,
        )

    patch.setattr(recover, "replay_producers", naive)


def forget_producers_with_the_process(patch: Patch) -> None:
    """R9: checkpoints do not include producer state."""
    patch.setattr(ProducerTable, "dump", lambda self, producers: [])


def take_unknown_producers_for_new(patch: Patch) -> None:
    """R9: an unknown producer is treated as a new one."""
    judge = ProducerTable.judge

    def naive(self: ProducerTable, *frame: int) -> FrameVerdict:
        verdict = judge(self, *frame)
        return FrameVerdict.NEW if verdict is FrameVerdict.UNKNOWN else verdict

    patch.setattr(ProducerTable, "judge", naive)


# --- consuming ----------------------------------------------------------------------------------


def believe_any_epoch(patch: Patch) -> None:
    """R10: sequences are accepted whatever their epoch."""
    patch.setattr(Partition, "clip_to_epoch", lambda self, start, end, epoch: (start, end))


def hand_out_at_once(patch: Patch) -> None:
    """R12: at-most-once rows are sent to the consumer before their event is durable."""
    patch.setattr(Broker, "_when_durable", lambda self, reply: reply)


def ignore_holds(patch: Patch) -> None:
    """R13: rows that a reconnecting client reports as held are delivered to it again."""
    patch.setattr(SharedGroup, "reclaim", lambda self, consumer, holds, now: self.offline(consumer, now))


def answer_acks_at_once(patch: Patch) -> None:
    """An ack is answered before its event is in the log."""
    ack = Broker.ack

    def naive(self: Broker, consumer: Any, ranges: Any, reply: Any, tags: Any = ()) -> None:
        ack(self, consumer, ranges, None, tags)
        if reply is not None:
            reply()

    patch.setattr(Broker, "ack", naive)


def forget_events(patch: Patch) -> None:
    """Events in the action log after the checkpoint are not replayed."""
    patch.setattr(recover.ActionReplay, "_event", lambda self, group, epoch, event, frame: None)


def seal_after_the_checkpoint(patch: Patch) -> None:
    """A checkpoint on a full disk includes effects of buffered events, which are then replayed on top of them."""
    patch.setattr(Turn, "settled_position", _position_without_sealing)


def _position_without_sealing(self: Turn) -> LogPositions:
    self.commit()
    return LogPositions(self.message_log.written, self.retained_log.written, self.action_index)


def remember_who_left(patch: Patch) -> None:
    """Every segment header defines every consumer id that a group ever had."""
    patch.setattr(Attachments, "_forget", lambda self, consumer: None)


# --- damage -------------------------------------------------------------------------------------


def cut_at_the_first_bad_frame(patch: Patch) -> None:
    """R18: recovery removes everything after a damaged frame."""
    patch.setattr(LogScan, "_never_durable", lambda self, *region: True)


def keep_nothing_aside(patch: Patch) -> None:
    """R18: bytes that recovery removes are not saved in quarantine."""
    patch.setattr(recovery, "keep_aside", lambda disk, log, damage: None)


def leave_the_torn_tail(patch: Patch) -> None:
    """R18: recovery does not remove a torn tail."""
    patch.setattr(Log, "zero_from", lambda self, offset: None)


def believe_frames_behind_missing_ones(patch: Patch) -> None:
    """R18: the remains of a turn that a power loss interrupted are reported as damage."""
    patch.setattr(LogScan, "_never_durable", lambda self, *region: False)


def believe_segments_behind_missing_ends(patch: Patch) -> None:
    """R18: a segment is read even if the one before is incomplete."""
    patch.setattr(LogScan, "_follows_missing", lambda self, segment, frame: False)


def define_partitions_once(patch: Patch) -> None:
    """R18: until a checkpoint, a partition is defined by a single frame."""
    patch.setattr(SegmentHeaders, "define", lambda self, rows: self._turn.append_own(self.catalog(rows)))


# --- order of writing ----------------------------------------------------------------------------


def sync_nothing(patch: Patch) -> None:
    """A sync reports success without syncing."""
    patch.setattr(SyncWork, "run", lambda self: None)


def leave_checkpoints_unsynced(patch: Patch) -> None:
    """A checkpoint's files are renamed into place before they are durable."""

    def naive(disk: Disk, path: str, data: bytes, *, draft: str = "") -> None:
        marks.write_file(disk, f"{path}.new", data, sync=False)
        disk.rename(f"{path}.new", path)
        disk.sync_directory("checkpoints")

    patch.setattr(checkpoint, "write_file", functools.partial(marks.write_file, sync=False))
    patch.setattr(checkpoint, "replace_file", naive)


def leave_segment_names_unsynced(patch: Patch) -> None:
    """A segment is written before its name is durable."""

    def naive(self: SegmentFiles, base: int, size: int) -> Any:
        file = self._disk.open(self.path(base), create=True)
        file.allocate(size)
        file.sync()
        return file

    patch.setattr(SegmentFiles, "_create", naive)


def trust_the_page_cache(patch: Patch) -> None:
    """R24: a start trusts a sync of bytes that it read, although after a failed sync this sync does not write them."""
    patch.setattr(Segment, "write_again", lambda self, start: self.file.sync())


# --- retention ----------------------------------------------------------------------------------


def keep_nothing(patch: Patch) -> None:
    """R21: expired rows are removed even if a group still needs them."""
    patch.setattr(DeadLetters, "retain", lambda self, group, pieces: [])


def expire_silently(patch: Patch) -> None:
    """R21: rows that retention removed are not counted as skipped."""
    patch.setattr(Cursor, "skipped", lambda self, start, end: ([], 0))


def delete_what_checkpoints_need(patch: Patch) -> None:
    """R21: retention deletes log segments that a checkpoint still needs."""
    remove_before = Log.remove_before
    patch.setattr(Log, "remove_before", lambda self, offset: remove_before(self, self.end))


def ask_only_the_shortest_subject(patch: Patch) -> None:
    """R21: a segment is deleted when the retention of one of its partitions has passed."""
    run = Retention.run

    def naive(self: Retention) -> list[int]:
        run(self)
        oldest = self._broker.checkpoints.oldest
        return self._broker.message_log.remove_before(oldest.message_offset) if oldest else []

    patch.setattr(Retention, "run", naive)


def skip_copies_behind_a_stale_start(patch: Patch) -> None:
    """R21: after a start from an old checkpoint, expired rows are looked up in the message log only."""
    patch.setattr(Partition, "expire_deleted", lambda self, log: None)


def forget_bucketed_rows(patch: Patch) -> None:
    """R21: a schedule partition starts at a checkpoint's position from before its rows were bucketed."""
    recovered = BucketedRows.recovered

    def naive(self: BucketedRows) -> None:
        starts = [(schedule.partition, schedule.partition.start) for schedule in self._schedules.by_name.values()]
        recovered(self)
        for partition, start in starts:
            partition.start = start

    patch.setattr(BucketedRows, "recovered", naive)


def delete_letters_before_it_is_known(patch: Patch) -> None:
    """R21: copies of expired dead letters are removed before the expiry is durable. A crash restores the letters."""
    patch.setattr(Retention, "_release_retained", Retention._retained_certain)


def leave_consume_files_of_the_dead(patch: Patch) -> None:
    """Only the process that replaced consume logs knows which files to remove."""
    patch.setattr(snapshot.Snapshots, "drop_unknown_consume_logs", lambda self: None)


def believe_equal_hashes(patch: Patch) -> None:
    """A query by key returns messages of other keys with the same hash."""

    def naive(frame: FrameView, _: bytes, number: int) -> Any:
        hashes = frame.key_hashes()
        return None if hashes is None or number not in hashes else hashes == number

    patch.setattr(search, "_rows_of_key", naive)


def compare_whole_hashes(patch: Patch) -> None:
    """A query by key does not find messages that moved to another partition after a refusal."""
    rows_of_key = search._rows_of_key

    def naive(frame: FrameView, key: bytes, number: int) -> Any:
        hashes = frame.key_hashes()
        rows = rows_of_key(frame, key, number)
        return rows if rows is None or hashes is None else rows & (hashes == number)

    patch.setattr(search, "_rows_of_key", naive)


def believe_indexes_are_complete(patch: Patch) -> None:
    """A query does not search the part of the newest segment that is not indexed yet."""
    of = MessageIndex.of

    def naive(self: MessageIndex, segment: Segment) -> Any:
        found = of(self, segment)
        return None if found is None else found._replace(end=segment.end)

    patch.setattr(MessageIndex, "of", naive)
