"""Data directories with a defect: the logs of a good one, rewritten with one change."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plait.frame.builder import build_frame, pack_stamp
from plait.frame.view import FrameView
from plait.storage.disk import RealDisk
from plait.storage.logs.action_events import Action
from plait.storage.logs.action_log import EVENTS, read_events
from plait.storage.logs.log import Log
from plait.storage.logs.recovery import LogScan
from plait.storage.reading.log_reader import LogReader

Events = npt.NDArray[Any]


def frames_of(data: Path, log: str) -> list[FrameView]:
    reader = LogReader(RealDisk(data, read_only=True), log)
    return [frame for _, frame in LogScan(reader.mapped(), 0, 0, stamps_durable=log == "message")]


def write(data: Path, log: str, frames: Iterable[tuple[list[Any], int]]) -> None:
    """Write a log of one segment."""
    target = Log(RealDisk(data), log, 1 << 22)
    for parts, size in frames:
        target.append(parts, size)
    target.write()
    target.close()


def whole(frame: FrameView) -> tuple[list[Any], int]:
    return [bytes(frame.buffer[: frame.size])], frame.size


def with_events(frame: FrameView, events: Events) -> tuple[list[Any], int]:
    """An action frame with other events."""
    rows = [row.tobytes() for row in np.split(events, len(events))]
    parts = build_frame(rows, producer=frame.producer, first=frame.first)
    parts.stamp_with(pack_stamp(EVENTS, frame.base, frame.store_time, 0, frame.epoch))
    return parts.parts, parts.size


def copied(data: Path, target: Path) -> None:
    """Copy without the checkpoints, because their offsets become wrong."""
    shutil.copytree(data, target, ignore=shutil.ignore_patterns("checkpoints", "consume", "LOCK"))


def without_message(data: Path, target: Path, sequence: int) -> None:
    """Remove the frame with this message from the message log."""
    copied(data, target)
    shutil.rmtree(target / "message")
    frames = [frame for frame in frames_of(data, "message") if not (frame.partition and frame.base == sequence)]
    write(target, "message", undurable(frames))


def undurable(frames: Iterable[FrameView]) -> Iterable[tuple[list[Any], int]]:
    """Clear the durable marks in the frames, because the offsets they name change."""
    for frame in frames:
        data = bytearray(frame.buffer[: frame.size])
        data[44:80] = pack_stamp(frame.partition, frame.base, frame.store_time, 0, frame.epoch)
        yield [bytes(data)], len(data)


def with_actions(data: Path, target: Path, change: Callable[[Events], Events]) -> None:
    """Replace the events of each frame by those that ``change`` returns; drop the frame if there are none."""
    copied(data, target)
    shutil.rmtree(target / "action")
    frames = []
    for frame in frames_of(data, "action"):
        if frame.partition != EVENTS:
            frames.append(whole(frame))
            continue
        events = change(read_events(frame).copy())
        if len(events):
            frames.append(with_events(frame, events))
    write(target, "action", frames)


def is_ack(events: Events, sequence: int) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = (
        (events["action"] == Action.ACK) & (events["start"] == sequence) & (events["end"] == sequence + 1)
    )
    return found


def swapped_acks(data: Path, target: Path, one: int, other: int) -> None:
    """Exchange the acks of two single messages."""

    def change(events: Events) -> Events:
        first, second = is_ack(events, one), is_ack(events, other)
        for name, add in (("start", 0), ("end", 1)):
            events[name][first], events[name][second] = other + add, one + add
        return events

    with_actions(data, target, change)
