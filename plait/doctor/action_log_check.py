"""Checks the action log: checksums, decodable frames, and that the messages its frames depend on exist (R3)."""

from __future__ import annotations

import msgspec

from plait.doctor.findings import CheckReport
from plait.doctor.log_check import LogCheck
from plait.doctor.log_walk import Walk
from plait.errors import FrameError
from plait.frame.view import FrameView
from plait.model.names import counted
from plait.storage.logs.action_events import KINDS
from plait.storage.logs.action_log import DEFINITIONS, EVENTS, presumed_retained, read_definitions, read_events


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
                self._add("damaged", offset, frame.size, problem, "use the version of Plait that wrote it")
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
