"""The action log: every frame's checksums, contents that decode, and what it presumes of the message log (R3)."""

from __future__ import annotations

import msgspec

from plait.cli.checkup.findings import Finding, Report
from plait.cli.checkup.segments import Walk
from plait.errors import FrameError
from plait.frame.view import FrameView
from plait.storage.action_log import DEFINITIONS, EVENTS, read_definitions, read_events

PART = "action log"
_HARM = "progress of groups is not known exactly: messages may be delivered again; none is lost"


class ActionCheck:
    """One walk over the action log; ``message_end`` is where the message log was found to end."""

    def __init__(self, walk: Walk, message_end: int, report: Report) -> None:
        self._walk = walk
        self._message_end = message_end
        self._report = report

    def run(self) -> None:
        presuming = 0
        first = 0
        for offset, frame in self._walk.frames():
            self._walk.facts.rows += frame.count
            if problem := _problem(frame):
                self._add("damaged", offset, frame.size, problem, _HARM, "use the Plait that wrote it")
            if frame.durable > self._message_end and not self._report.in_use:
                first = first if presuming else offset
                presuming += 1
        if presuming:
            what = f"{presuming} frames rest on messages that never reached the disk"
            self._add("note", first, None, what, _HARM, "nothing: the next start cuts them off")
        for damage in self._walk.damages:
            if damage.kind == "torn":
                what, advice = f"an unfinished tail: {damage.reason}", "nothing: the next start cuts it"
                self._add("note", damage.offset, damage.size, what, _HARM, advice)
            else:
                advice = "restore this file from a copy while the server is stopped; without one it goes on"
                self._add("damaged", damage.offset, damage.size, damage.reason, _HARM, advice)

    def _add(self, severity: str, offset: int, size: int | None, what: str, harm: str, advice: str) -> None:
        file, position = self._walk.place(offset)
        self._report.add(
            Finding(
                severity="damaged" if severity == "damaged" else "note",
                part=PART,
                file=file,
                offset=position,
                size=size,
                what=what,
                harm=harm,
                advice=advice,
            )
        )


def _problem(frame: FrameView) -> str:
    try:
        if frame.partition == DEFINITIONS:
            read_definitions(frame)
        elif frame.partition == EVENTS:
            read_events(frame)
        else:
            return f"frame kind {frame.partition} is not known"
    except (FrameError, ValueError, msgspec.MsgspecError) as error:
        return f"a frame does not decode: {error}"
    return ""
