"""A limit of CPU time, so that a loop without progress fails its test instead of hanging it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def within_cpu_seconds(seconds: float) -> Iterator[None]:
    """Raise ``AssertionError`` inside the block once it has used this much CPU time, however slow the machine is."""

    def expired(_: int, frame: FrameType | None) -> None:
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "no Python code"
        raise AssertionError(f"still running after {seconds:g} s of CPU time, at {place}")

    previous = signal.signal(signal.SIGVTALRM, expired)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
