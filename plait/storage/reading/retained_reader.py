"""Reading a kept log that somebody else may be writing: as ``action_reader`` does, but for what its frames rest on."""

from __future__ import annotations

from plait.frame.view import FrameView
from plait.storage.disk import RealDisk
from plait.storage.logs.retained_log import DIRECTORY
from plait.storage.reading.action_reader import ActionReader


class RetainedReader(ActionReader):
    """The segments of a kept log as they were when it was opened."""

    def _known_durable(self) -> int:
        return self.checkpoint.manifest.kept_end if self.checkpoint is not None else 0

    def _presumes(self, frame: FrameView) -> tuple[int, int]:
        # A copy of rows stands by itself; whether it is of any use, the action log says.
        return 0, 0


def open_kept(path: str) -> RetainedReader:
    """The kept log of a data directory; one without any rows where there is none."""
    return RetainedReader(RealDisk(path, read_only=True), DIRECTORY, path)
