"""Keys of messages that a client sent to another partition after a refusal: their order is no longer promised (R6)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from plait.client.send.partition_sender import PartitionSender
from plait.client.send.resend_window import SentFrame
from plait.client.send.subject_sender import SubjectSender
from plait.errors import PlaitError
from plait.frame.columns import Column
from plait.frame.view import FrameView


@contextmanager
def recording_moves(keys: set[str]) -> Iterator[None]:
    """Add the keys of every message that moves in this block."""
    move = SubjectSender.move

    def recorded(self: SubjectSender, frame: SentFrame, sender: PartitionSender, error: PlaitError) -> bool:
        moved = move(self, frame, sender, error)
        view = FrameView(frame.parts.tobytes())
        if moved and view.has(Column.KEY):
            keys.update(key.decode() for key in view.rows(Column.KEY, 0, view.count))
        return moved

    SubjectSender.move = recorded  # type: ignore[method-assign]
    try:
        yield
    finally:
        SubjectSender.move = move  # type: ignore[method-assign]
