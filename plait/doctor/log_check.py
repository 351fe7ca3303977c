"""The common part of the checks of the action log and the retained log: findings for damage and torn tails."""

from __future__ import annotations

from plait.doctor.findings import CheckReport, Finding
from plait.doctor.log_walk import Walk


class LogCheck:
    """One walk over a log. Each finding has ``part`` and ``harm``."""

    part = ""
    harm = ""

    def __init__(self, walk: Walk, report: CheckReport) -> None:
        self._walk = walk
        self._report = report

    def _add_damages(self) -> None:
        """Add a finding for each damage; call it after all frames."""
        for damage in self._walk.damages:
            if damage.kind == "torn":
                what, advice = f"a torn tail: {damage.reason}", "nothing: the next start removes it"
                self._add("note", damage.offset, damage.size, what, advice)
            else:
                advice = "restore this file from a copy while the server is stopped; without a copy the server skips it"
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
