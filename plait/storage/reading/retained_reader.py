"""Reading a retained log that another process may be writing. Its frames depend on no other log."""

from __future__ import annotations

from plait.frame.view import FrameView
from plait.storage.disk import RealDisk
from plait.storage.logs.retained_log import DIRECTORY
from plait.storage.reading.action_reader import ActionReader


class RetainedReader(ActionReader):
    """The segments of a retained log, as of opening it."""

    def _known_durable(self) -> int:
        return self.checkpoint.manifest.kept_end if self.checkpoint is not None else 0

    def _presumes(self, frame: FrameView) -> tuple[int, int]:
        # A copy of rows is complete in itself. The action log decides whether it is needed.
        return 0, 0


def open_retained(path: str) -> RetainedReader:
    """The retained log of a data directory; empty if the directory has none."""
    return RetainedReader(RealDisk(path, read_only=True), DIRECTORY, path)
