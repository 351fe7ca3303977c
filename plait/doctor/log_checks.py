"""Checks the action log and the retained log: checksums, frames that decode, and messages that exist (R3)."""

from __future__ import annotations

import msgspec

from plait.doctor.findings import CheckReport, Severity
from plait.doctor.log_walk import Walk
from plait.errors import FrameError
from plait.frame.view import FrameView
from plait.model.names import counted
from plait.storage.logs.action_events import KINDS
from plait.storage.logs.action_log import DEFINITIONS, EVENTS, presumed_retained, read_definitions, read_events
from plait.storage.logs.retained_log import is_header, note_of

#: The advice for bytes that cannot be read.
RESTORE = "restore this file from a copy while the server is stopped; without a copy the server skips "
_OTHER_VERSION = "use the version of Plait that wrote it"


class LogCheck:
    """One walk over a log. Each finding has ``part``, and ``harm`` unless it has its own."""

    part = ""
    harm = ""

    def __init__(self, walk: Walk, report: CheckReport) -> None:
        self._walk = walk
        self._report = report

    def _add(
        self, severity: Severity, offset: int, size: int | None, what: str, advice: str, harm: str | None = None
    ) -> None:
        file, position = self._walk.place(offset)
        harm = self.harm if harm is None else harm
        self._report.add(severity, self.part, file, what, harm, advice, offset=position, size=size)

    def _add_damages(self) -> None:
        """Add a finding for each damage; call it after all frames."""
        for damage in self._walk.damages:
            if damage.kind == "torn":
                what, advice = f"a torn tail: {damage.reason}", "nothing: the next start removes it"
                self._add("note", damage.offset, damage.size, what, advice)
            else:
                self._add("damaged", damage.offset, damage.size, damage.reason, RESTORE + "it")


class RetainedCheck(LogCheck):
    """One walk over the retained log: the notes of dead letters decode."""

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
                self._add("damaged", offset, frame.size, str(error), _OTHER_VERSION)
        self._add_damages()


class ActionCheck(LogCheck):
    """One walk over the action log. ``ends``: the ends of the message log and the retained log."""

    part = "action log"
    harm = "progress of groups is not known exactly: messages may be delivered again; none is lost"

    def __init__(self, walk: Walk, ends: tuple[int, int], report: CheckReport) -> None:
        super().__init__(walk, report)
        self._message_end, self._retained_end = ends

    def run(self) -> None:
        presuming = 0
        first = 0
        for offset, frame in self._walk.frames():
            self._walk.facts.rows += frame.count
            if problem := _problem(frame):
                self._add("damaged", offset, frame.size, problem, _OTHER_VERSION)
            presumes = frame.durable > self._message_end or presumed_retained(frame) > self._retained_end
            if presumes and not self._report.in_use:
                first = first if presuming else offset
                presuming += 1
        if presuming:
            what = f"{counted(presuming, 'frame')} depend on messages that did not reach the disk"
            self._add("note", first, None, what, "nothing: the next start removes them")
        self._add_damages()


def _problem(frame: FrameView) -> str:
    try:
        if frame.partition == DEFINITIONS:
            read_definitions(frame)
        elif frame.partition == EVENTS:
            unknown = set(read_events(frame)["action"].tolist()) - KINDS.keys()
            if unknown:
                return f"unknown actions {sorted(unknown)}"
        else:
            return f"unknown frame kind {frame.partition}"
    except (FrameError, ValueError, msgspec.MsgspecError) as error:
        return f"a frame does not decode: {error}"
    return ""
