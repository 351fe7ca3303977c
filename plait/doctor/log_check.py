"""What the checks of the logs beside the message log have in common: damage and tails, and what to do about them."""

from __future__ import annotations

from plait.doctor.findings import CheckReport, Finding
from plait.doctor.log_walk import Walk


class LogCheck:
    """One walk over a log; a finding says that it is in ``part`` and what ``harm`` is done."""

    part = ""
    harm = ""

    def __init__(self, walk: Walk, report: CheckReport) -> None:
        self._walk = walk
        self._report = report

    def _tell_damages(self) -> None:
        """After all frames were looked at."""
        for damage in self._walk.damages:
            if damage.kind == "torn":
                what, advice = f"an unfinished tail: {damage.reason}", "nothing: the next start cuts it"
                self._add("note", damage.offset, damage.size, what, advice)
            else:
                advice = "restore this file from a copy while the server is stopped; without one it goes on"
                self._add("damaged", damage.offset, damage.size, damage.reason, advice)

    def _add(self, severity: str, offset: int, size: int | None, what: str, advice: str) -> None:
        file, position = self._walk.place(offset)
        self._report.add(
            Finding(
                severity="damaged" if severity == "damaged" else "note",
                part=self.part,
                file=file,
                offset=position,
                size=size,
                what=what,
                harm=self.harm,
                advice=advice,
            )
        )
