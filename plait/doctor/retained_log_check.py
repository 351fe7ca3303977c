"""Checks the retained log: the checksums of every frame, and that the notes of dead letters decode."""

from __future__ import annotations

from plait.doctor.log_check import LogCheck
from plait.errors import FrameError
from plait.storage.logs.retained_log import is_header, note_of


class RetainedCheck(LogCheck):
    """One walk over the retained log."""

    part = "retained log"
    harm = "dead letters, or messages that a group still needs after retention, are missing here"

    def run(self) -> None:
        for offset, frame in self._walk.frames():
            if is_header(frame):
                continue
            self._walk.facts.rows += frame.count
            try:
                note_of(frame)
            except FrameError as error:
                self._add("damaged", offset, frame.size, str(error), "use the version of Plait that wrote it")
        self._add_damages()
