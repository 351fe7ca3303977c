"""Delivers the rows of an ordered group: each owner gets the rows of its cursors, returned rows before new rows.

Cursors at the same position are read together, and cut out of each frame as one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import takewhile

import msgspec
import numpy as np

from plait.broker.groups.filtered_rows import examine
from plait.broker.groups.group import AttachedConsumer, Group
from plait.broker.groups.limited_delivery import take_limited
from plait.broker.groups.ordered.cursor_set import CursorSet
from plait.broker.groups.ordered.frame_pieces import LOOK_MAX, Chooser, FramePiece, RowTake, cut_matching, cut_out
from plait.broker.groups.ordered.in_flight import InFlightRows
from plait.broker.groups.ordered.left_out import LeftOutRows
from plait.broker.groups.ordered.row_reader import RowCounter, RowReader
from plait.broker.partitions.partition import Delivery
from plait.frame.header import SEQUENCE_MAX
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS
from plait.storage.cursor import Cursor
from plait.storage.ranges import joined

#: Each pull tries to join at most ``JOIN_ALWAYS`` cursors of the owner; every ``JOIN_EVERY``-th pull tries more.
JOIN_ALWAYS = 16
JOIN_EVERY = 8
#: The most rows that one pull delivers of a key that has not caught up (``CursorSet.behind``).
KEY_ROWS_MAX = 100


class OrderedDelivery(msgspec.Struct, eq=False):
    """Chooses, reads and cuts the rows that a pull of an ordered group gets."""

    _group: Group
    _cursors: CursorSet
    _reader: RowReader
    _in_flight: InFlightRows
    #: Counts pulls; decides which of an owner's cursors is served first.
    _turn: int = 0
    #: The last tag for redelivered rows and for several keys, counting down; other tags are cursor numbers.
    _tag: int = 0

    def take(self, consumer: AttachedConsumer, count: int, size: int) -> Delivery | None:
        """Rows for a consumer from the LPs that it owns; None if there are none. An empty delivery: pull again."""
        taking, visible = RowTake(count, size, Delivery()), self._group.partition.visible
        if self._group.wanted is not None:
            taking.filtered = self._group
        lps: list[Cursor] = []
        keys: list[Cursor] = []
        again = False
        for cursor in self._group.positions.values():
            if cursor.owner == consumer.id and not cursor.leaving:
                if cursor.key is None:
                    lps.append(cursor)
                    again = again or cursor.returned.length > 0
                elif not cursor.parked:
                    keys.append(cursor)
        self._turn += 1
        if self._turn % JOIN_EVERY == 0:
            self._in_flight.trim(self._cursors.holding(consumer.id))
        if len(lps) > 1 and (len(lps) <= JOIN_ALWAYS or self._turn % JOIN_EVERY == 0):
            self._cursors.join_alike(lps)
            lps = [each for each in lps if self._cursors.all.get(each.id) is each]
        if keys:
            # A key that joins may return rows to the cursor of its logical partition.
            again, keys = True, self._in_flight.rejoin(keys)
        abreast: list[Cursor] = []
        for cursor in keys:
            if troubled := self._cursors.is_behind(cursor):
                # No row of a key that has not caught up is delivered before its last delivery is done.
                if not cursor.held and not cursor.waiting:
                    self._take_key(cursor, taking)
                troubled = bool(cursor.held) or self._cursors.is_behind(cursor)
            if not troubled:
                abreast.append(cursor)
        while again and taking.more:
            again = self._serve_again(lps, taking)
        by_next: dict[tuple[int, int], list[Cursor]] = {}
        for cursor in [*lps, *abreast]:
            if not self._at_limit_of(cursor):
                by_next.setdefault((cursor.next, cursor.limit), []).append(cursor)
        places = sorted(by_next)
        turn = self._turn % len(places) if places else 0
        for place in [*places[turn:], *places[:turn]]:
            (start, limit), end = place, visible
            for above, _ in places:
                if start < above < end:
                    end = above
            if limit:
                end = min(end, limit)
            if start < end and taking.more:
                self._serve(by_next[place], start, end, 0, taking)
        delivery = taking.delivery
        return delivery if delivery.count or taking.looked >= LOOK_MAX else None

    def serve(self) -> None:
        """Answer suspended pulls. Each gets rows of its own LPs, so one without rows does not end the others."""
        group, ready = self._group, set()
        visible = group.partition.visible
        take = self.take if group.rate is None else partial(take_limited, group)
        # A cheap test: most owners have no rows.
        for cursor in self._group.positions.values():
            end = min(visible, cursor.limit) if cursor.limit else visible
            if not cursor.leaving and (cursor.next < end or cursor.returned.length):
                ready.add(cursor.owner)
        for waiter in list(self._group.waiters):
            if waiter.consumer.id in ready:
                delivery = take(waiter.consumer, waiter.count, waiter.size)
                if delivery is not None and waiter.leave():
                    waiter.reply(delivery)

    def _take_key(self, cursor: Cursor, taking: RowTake) -> None:
        rows, before = taking.rows, -1
        taking.limit(KEY_ROWS_MAX)
        while taking.more:
            if cursor.returned:
                start, end, attempt = cursor.returned.head()
            else:
                start, end, attempt = cursor.next, self._cursors.parent(cursor).next, 0
            end = cursor.until(end)
            if attempt:
                # A failed row is delivered alone.
                taking.limit(0 if cursor.held else 1)
            # Each piece starts after the previous one. No progress means that there are no rows.
            if not before < start < end or not taking.more:
                break
            self._serve([cursor], start, end, attempt, taking)
            before = start
        taking.rows = rows

    def _at_limit_of(self, cursor: Cursor) -> bool:
        limits = self._group.limits
        return (
            sum(map(len, cursor.held.values())) >= limits.consumer_ranges
            or cursor.waiting.length >= limits.retry_ranges
            or len(self._group.retained.offsets) >= limits.retained_messages
            or len(self._cursors.by_key) >= limits.held_keys
        )

    def _serve_again(self, cursors: list[Cursor], taking: RowTake) -> bool:
        """Deliver returned rows that lie in the frame of the lowest returned row; False: there are none, or no room.

        Rows of many cursors in one frame are delivered as one piece under a new tag, because rows between them may
        already be held.
        """
        ready = [
            cursor
            for cursor in cursors
            if cursor.returned and cursor.returned.first < cursor.until(SEQUENCE_MAX) and not self._at_limit_of(cursor)
        ]
        if not ready:
            return False
        lead = min(ready, key=lambda cursor: cursor.returned.first)
        start, end, attempt = lead.returned.head()
        again = attempt > 0 or self._group.wanted is not None
        found = next(self._frames(start, lead.until(end), again=again), None)
        taking.looked += 1
        if found is None or found[0] > start:
            # The rows were in the retained log, and are no longer there.
            lead.settled(start, lead.until(end) if found is None else found[0])
            return True
        first, last, frame = found
        if frame is None:
            self._in_flight.skip_rows(RowCounter(self._group.partition, self._reader, 0), lead, first, last)
            return True
        frame_end = frame.end if first >= self._group.partition.start else last
        return self._serve_frame(ready, frame, first, frame_end, attempt, taking)

    def _serve_frame(
        self, ready: list[Cursor], frame: FrameView, first: int, frame_end: int, attempt: int, taking: RowTake
    ) -> bool:
        """Deliver returned rows of cursors in [first, frame_end), all in one frame; False: they do not fit."""
        keys, sequences, matching = self._group.partition.keys.of(frame), frame.sequences(), None
        if self._group.wanted is not None and not attempt:
            matching = examine(self._group, frame, int(np.searchsorted(sequences, first)))
            if matching.last < frame.count:
                frame_end = min(frame_end, int(sequences[matching.last]))
        # In the order of each cursor: a row with another attempt ends its cursor's part of the piece.
        pieces = [
            (index, piece)
            for index, cursor in enumerate(ready)
            for piece in takewhile(
                lambda piece: piece.attempt == attempt, cursor.returned.overlap(first, cursor.until(frame_end))
            )
        ]
        owners = np.full(LOGICAL_PARTITIONS, -1, np.int64)
        for index, cursor in enumerate(ready):
            owners[cursor.lps] = index
        whose = owners[keys.lps]
        if self._cursors.by_key and keys.hashes is not None:
            whose[np.isin(keys.hashes, np.fromiter(self._cursors.by_key, np.uint64, len(self._cursors.by_key)))] = -1
        wanted = np.zeros(frame.count, bool)
        for index, piece in pieces:
            low, high = np.searchsorted(sequences, (piece.start, piece.end)).tolist()
            wanted[low:high] |= whose[low:high] == index
        out = None
        if matching is not None:
            matches = matching.whole(frame.count)
            out, left_out = LeftOutRows(self._group), np.flatnonzero(wanted & ~matches)
            wanted &= matches
        rows = np.flatnonzero(wanted)
        taking.looked += len(pieces)
        cut, room = SEQUENCE_MAX, taking.rows - taking.delivery.count
        if len(rows) > room:
            rows = rows[:room]
            cut = int(sequences[rows[-1]]) + 1
        chosen = cut_out(frame, sequences, rows, frame_end, taking)
        if chosen is None:
            return False
        rows = chosen.places
        if len(rows):
            self._tag -= 1
            self._add(chosen, attempt + 1, self._tag, taking.delivery)
        for index, piece in pieces:
            if piece.start >= cut:
                continue
            cursor, stop = ready[index], min(piece.end, cut)
            low, high = np.searchsorted(sequences[rows], (piece.start, stop)).tolist()
            mine = rows[low:high][whose[rows[low:high]] == index]
            cursor.settled(piece.start, stop)
            if out is not None:
                others = sequences[left_out[whose[left_out] == index]]
                others = others[slice(*np.searchsorted(others, (piece.start, stop)).tolist())]
                taking.runs += out.pull(cursor, self._tag, sequences[mine], others)
            elif len(mine):
                # From the first row to the last: no ack covers what lies outside.
                cursor.pulled(self._tag, int(sequences[mine[0]]), int(sequences[mine[-1]]) + 1, attempt + 1)
        return True

    def _serve(self, cursors: list[Cursor], start: int, end: int, attempt: int, taking: RowTake) -> None:
        """Deliver the rows of these cursors in [start, end). All of them are at ``start``, or got [start, end) back."""
        tag = cursors[0].id
        if cursors[0].key is not None:
            # A delivery for several keys gets a new tag: the number of one key would also tag its later deliveries.
            tag = self._tag = self._tag - 1
        chooser = Chooser(cursors)
        out = None if self._group.wanted is None or attempt else LeftOutRows(self._group)
        for first, last, frame in self._frames(start, end, again=attempt > 0 or out is not None):
            if frame is None:
                if out is not None:
                    out.record()
                for cursor in cursors:
                    self._in_flight.skip_rows(RowCounter(self._group.partition, self._reader, 0), cursor, first, last)
                continue
            piece = self._cut(frame, chooser, first, last, taking, filtered=out is not None)
            if piece is None:
                break
            whole = [(piece.first, piece.last)] if piece.parts else []
            if out is not None:
                whole = out.examined(frame, piece)
                taking.runs += len(whole)
            for cursor in cursors:
                held = whole
                if cursor.key is not None and len(cursors) > 1:
                    # Only the key's own rows are in flight for it: it can rejoin as soon as these are done.
                    keys = self._group.partition.keys.of(frame)
                    mine = cursor.chooses(keys.lps, keys.hashes)[piece.places]
                    held = joined(frame.sequences()[piece.places[mine]])
                at = start
                for low, high in held:
                    # Ranges without a row of the cursor are passed, and not held.
                    if at < low:
                        cursor.settled(at, low)
                    cursor.pulled(tag, low, high, attempt + 1)
                    at = high
                if at < piece.end:
                    cursor.settled(at, piece.end)
                if out is not None:
                    out.add(cursor, held)
            start = piece.end
            if piece.parts:
                self._add(piece, attempt + 1, tag, taking.delivery)
            if piece.end < last or not taking.more:
                break
        else:
            if start < end:
                for cursor in cursors:
                    cursor.settled(start, end)
        if out is not None:
            out.record()

    def _frames(self, start: int, end: int, *, again: bool) -> Iterator[tuple[int, int, FrameView | None]]:
        """(first, last, frame) of the rows in [start, end); ``frame`` is None if it is unreadable."""
        partition, log = self._group.partition, self._group.journal.message_log
        if partition.log_start == log.start and start >= partition.start:
            return partition.walk(log, start, end, again=again)
        return self._reader.walk(start, end, again=again)

    def _add(self, piece: FramePiece, attempt: int, tag: int, delivery: Delivery) -> None:
        delivery.parts.extend(piece.parts)
        delivery.ranges.append((piece.first, piece.last, attempt))
        delivery.tags.append(tag)
        delivery.count += piece.rows
        delivery.size += piece.size
        delivery.weight += piece.weight
        if attempt > 1:
            self._group.redelivered_count += piece.rows

    def _cut(
        self, frame: FrameView, chooser: Chooser, first: int, last: int, taking: RowTake, *, filtered: bool
    ) -> FramePiece | None:
        """The chosen rows of a frame in [first, last), up to the room of the pull; None: the piece does not fit.

        ``filtered``: only those that match the group's filter.
        """
        sequences = frame.sequences()
        low, high = np.searchsorted(sequences, [first, last]).tolist()
        taking.looked += high - low
        room = taking.rows - taking.delivery.count
        if chooser.all:
            rows = np.arange(low, high if filtered else min(high, low + room))
        else:
            rows = low + np.flatnonzero(chooser(self._group.partition.keys.of(frame))[low:high])
        if filtered:
            matching = np.empty(0, bool)
            if len(rows):
                found = examine(self._group, frame, low)
                if found.last < high:
                    last, rows = int(sequences[found.last]), rows[: np.searchsorted(rows, found.last)]
                matching = found.mask[rows - low]
            return cut_matching(frame, sequences, rows, matching, last, taking)
        rows = rows[:room]
        end = last if len(rows) < room else int(sequences[rows[-1]]) + 1
        piece = cut_out(frame, sequences, rows, end, taking)
        return piece if piece is None or piece.rows else piece._replace(end=last)
