"""``MessageIndex``: the indexes of the segments of a message log.

A sealed segment has an index file; the newest segment is indexed in memory while it grows, except for its last few
MiB. ``begin`` returns the next piece of work, whose ``run`` may block in a thread, or None. Index files are derived:
they are removed with their segments, and built again if they are missing, damaged, or do not match their segment.

The file of a segment is finished only when all of the segment is durable: a crash then leaves the segment as it is.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from plait.errors import DamageError, FrameError
from plait.frame.view import FrameView
from plait.limits import MIB
from plait.storage.disk import Disk
from plait.storage.index.index_builder import IndexBuilder, Indexed
from plait.storage.index.index_file import DIRECTORY, IndexFile, base_of, index_path
from plait.storage.logs.log import Log
from plait.storage.logs.segment import Segment

log = logging.getLogger("plait.broker")

#: The newest segment is indexed in pieces of at least this size: the rest is scanned in a few milliseconds.
AHEAD_SIZE: Final = 4 * MIB
#: Index files that are open; the least recently used one is closed.
OPEN_MAX: Final = 256


def _nothing() -> None: ...


class IndexWork(NamedTuple):
    """One piece of work. ``run`` blocks; ``done`` follows on the loop."""

    run: Callable[[], None]
    done: Callable[[], None] = _nothing


class MessageIndex:
    """Which segments are indexed, and what to do next."""

    def __init__(self, disk: Disk, messages: Log) -> None:
        self._disk = disk
        self._log = messages
        #: The bases of the segments with a file, whether it is readable or not; None: not listed yet.
        self._files: set[int] | None = None
        self._open: OrderedDict[int, IndexFile] = OrderedDict()
        #: The index that is being built.
        self._builder: IndexBuilder | None = None
        #: Segments that cannot have an index, because they have no intact frame.
        self._without: set[int] = set()
        #: Files that belong to no segment.
        self._strays: list[str] = []
        #: The log offset up to which this round indexes the newest segment.
        self._goal = 0

    # --- looking up -----------------------------------------------------------------------------

    def of(self, segment: Segment) -> Indexed | None:
        """What of a segment is indexed; None: nothing."""
        builder = self._builder
        if builder is not None and builder.base == segment.base:
            return builder.indexed
        known = self._open.get(segment.base)
        if known is not None:
            self._open.move_to_end(segment.base)
        elif segment.base not in self._listed():
            return None
        else:
            known = self._opened(segment)
            if known is None:
                return None
        return Indexed(known.parts, known.facts.end)

    def _listed(self) -> set[int]:
        """The bases of the segments with a file."""
        if self._files is None:
            names = self._disk.list(DIRECTORY)
            self._files = {base for name in names if (base := base_of(name)) is not None}
            self._strays = [f"{DIRECTORY}/{name}" for name in names if base_of(name) is None]
        return self._files

    def _opened(self, segment: Segment) -> IndexFile | None:
        try:
            file = IndexFile(self._disk, segment.base)
            end = self._end_of(segment)
            if end is None or not file.matches(segment.view, segment.base, end):
                raise DamageError(f"{file.path} belongs to other content of the segment")
        except (DamageError, OSError) as error:
            self.reject(segment.base, error)
            return None
        self._open[segment.base] = file
        if len(self._open) > OPEN_MAX:
            self._open.popitem(last=False)
        return file

    def reject(self, base: int, error: Exception) -> None:
        """Build the index of a segment again, because it cannot be used."""
        log.warning("the index of segment %020d is built again: %s", base, error)
        self._open.pop(base, None)
        if self._builder is not None and self._builder.base == base:
            self.give_up()
        self._listed().discard(base)

    def _end_of(self, segment: Segment) -> int | None:
        """The end of the frames of a sealed segment; None: it is not sealed."""
        segments = self._log.segments
        index = next((i for i, each in enumerate(segments) if each is segment), len(segments))
        if index + 1 >= len(segments):
            return None
        following = segments[index + 1]
        if self._log.written <= following.base:
            return None
        try:
            # A segment header names the end of the segment before.
            end = FrameView(following.view, 0).verify_stamp().previous
        except FrameError:
            return segment.end
        return end if segment.base < end <= segment.end else segment.end

    # --- building -------------------------------------------------------------------------------

    def look(self) -> None:
        """Note which segments there are, and how far to index the newest one. Call it before a round of ``begin``."""
        segments, files = self._log.segments, self._listed()
        bases = {segment.base for segment in segments[:-1]}
        for base in files - bases:
            files.discard(base)
            self._open.pop(base, None)
            self._strays.append(index_path(base))
        self._without &= bases
        if self._builder is not None and self._builder.base not in bases | {each.base for each in segments[-1:]}:
            self.give_up()
        self._goal = self._log.written

    def give_up(self) -> None:
        """Forget the index that is being built, because its segment was removed or its file cannot be written."""
        builder, self._builder = self._builder, None
        if builder is not None:
            builder.close()
            self._strays.append(builder.draft)

    def begin(self) -> IndexWork | None:
        """The next piece of work; None: everything is indexed that can be now.

        The caller calls ``run``, in a thread, then ``done``.
        """
        if self._strays:
            strays, self._strays = self._strays, []
            return IndexWork(lambda: self._remove(strays))
        segment, end, sealed = self._target()
        if segment is None:
            return None
        builder = self._builder
        if builder is None or builder.base != segment.base:
            self.give_up()
            builder = self._builder = IndexBuilder(self._disk, segment.base, self._log.resumed_at)
        building, view = builder, segment.view
        if building.end < end:
            return IndexWork(lambda: self._step(building, view, end))
        assert sealed
        return IndexWork(lambda: self._finish(building, view), lambda: self._finished(building))

    def _target(self) -> tuple[Segment | None, int, bool]:
        """The segment to index now, the offset up to which, and whether it is sealed: the newest sealed one first."""
        segments, messages, files = self._log.segments, self._log, self._listed()
        for segment in reversed(segments[:-1]):
            if segment.base in files or segment.base in self._without:
                continue
            end = self._end_of(segment)
            if end is not None and messages.durable >= end:
                return segment, end, True
        builder = self._builder
        if segments and (builder is None or builder.base == segments[-1].base):
            begun = segments[-1].base if builder is None else builder.indexed.end
            if self._goal - begun >= AHEAD_SIZE:
                return segments[-1], self._goal, False
        return None, 0, False

    def _step(self, builder: IndexBuilder, view: memoryview, end: int) -> None:
        if not builder.step(view, end):
            builder.publish()

    def _finish(self, builder: IndexBuilder, view: memoryview) -> None:
        if not builder.finish(view):
            self._without.add(builder.base)

    def _finished(self, builder: IndexBuilder) -> None:
        if self._builder is builder:
            self._builder = None
            if builder.base not in self._without:
                self._listed().add(builder.base)

    def _remove(self, paths: list[str]) -> None:
        for path in paths:
            self._disk.remove(path)

    def close(self) -> None:
        """Close the file that is being written."""
        if self._builder is not None:
            self._builder.close()
            self._builder = None
