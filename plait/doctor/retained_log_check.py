"""The kept log: every frame's checksums, and that what it says of dead letters can be read."""

from __future__ import annotations

from plait.doctor.log_check import LogCheck
from plait.errors import FrameError
from plait.storage.logs.retained_log import is_head, note_of


class RetainedCheck(LogCheck):
    """One walk over the kept log."""

    part = "kept log"
    harm = "dead letters, or retries that outlived their subject's retention, are missing here"

    def run(self) -> None:
        for offset, frame in self._walk.frames():
            if is_head(frame):
                continue
            self._walk.facts.rows += frame.count
            try:
                note_of(frame)
            except FrameError as error:
                self._add("damaged", offset, frame.size, str(error), "use the Plait that wrote it")
        self._tell_damages()
