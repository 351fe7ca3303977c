"""Message log files that were deleted or overwritten outside of the broker: the next start reports damage.

A random run ends with a clean stop or a kill, and then the message log is changed in a way that no crash can. If an
acknowledged message is lost, the start must report damage: neither a clean start nor a torn tail.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from plait.broker.recovery import start_up as recover
from plait.storage.checkpoint import Checkpoints
from plait.storage.logs.log import Log
from plait.storage.logs.segment import used_size
from plait.storage.marks import DurableMark
from plait.testing.simulated_disk import SimulatedDisk
from tests.support.broker_node import Node
from tests.support.broker_trace import Trace

Harm = Callable[[SimulatedDisk, random.Random], str]
LIVES = 12
OPERATIONS = 60


def live(number: int) -> tuple[Trace, random.Random]:
    """A run that has ended, with durable marks as of one second after the last write."""
    rng = random.Random(number)
    trace = Trace(number, "sync", SimulatedDisk(), operations=OPERATIONS)
    trace.run()
    if rng.random() < 0.5:
        trace.node.broker.stop()
    else:
        trace.node.sync()
        for log in trace.node.broker.logs:
            log.note_durable()
    return trace, rng


def remove_files(disk: SimulatedDisk, rng: random.Random) -> str:
    files = [name for name in disk.list("message") if name.endswith(".log")]
    first = rng.randrange(len(files))
    gone = rng.choice([files[:1], files[-1:], files[first : first + 1], files[first:], files])
    for name in gone:
        disk.remove(f"message/{name}")
    return f"without {gone}"


def overwrite(disk: SimulatedDisk, rng: random.Random) -> str:
    """Overwrite bytes after the last checkpoint; a start does not read those before it, only ``plait doctor`` does."""
    log = Log(disk, "message", 0)
    known = Checkpoints(disk).load()
    covered = known.manifest.message_offset if known is not None else 0
    behind = [segment for segment in log.segments if used_size(segment.view, 0) > max(covered - segment.base, 0)]
    if not behind:
        return "nothing after the checkpoint"
    segment = rng.choice(behind)
    used = used_size(segment.view, 0)
    start = rng.randrange(max(covered - segment.base, 0), used)
    size = min(rng.choice([600, 3_000]), used - start)
    data = rng.choice([bytes(size), rng.randbytes(size)])
    segment.file.write([data], start)
    return f"{segment.base}+{start}: {size} bytes, zeros {not any(data)}"


def check(number: int, harm: Harm) -> bool:
    """Return whether messages were lost, and check that the start reports it."""
    trace, rng = live(number)
    outcome = trace.observed
    what = harm(trace.disk, rng)
    node = Node(trace.disk, trace.clock, trace.config)
    lost = 0
    for frame in outcome.frames:
        if frame.acknowledged and frame.subject in node.broker.subjects:
            stored = {(row.producer, row.number) for row in node.stored(frame.subject)}
            first = max(outcome.expired.get(frame.subject, 0) - (frame.sequence or 0), 0)
            lost += sum(
                (frame.view.producer, frame.view.first + row) not in stored for row in range(first, len(frame.bodies))
            )
        elif frame.acknowledged:
            lost += 1
    if lost:
        assert not node.report.clean, f"run {number}, {what}: {lost} messages are lost after a clean start"
        kinds = {damage.kind for damage in node.report.damages}
        assert "damaged" in kinds, f"run {number}, {what}: {lost} messages are lost, reported as {kinds}"
    return bool(lost)


def check_all(numbers: Iterable[int], harm: Harm) -> bool:
    losses = [check(number, harm) for number in numbers]
    return any(losses)


@pytest.mark.parametrize("harm", [remove_files, overwrite])
def test_every_start_after_a_loss_reports_damage(harm: Harm, seed: int):
    assert check_all(range(seed, seed + LIVES), harm)


def believe_marks_of_frames_alone(patch: pytest.MonkeyPatch) -> None:
    """A defect: durable marks are ignored."""
    patch.setattr(recover, "_durable", lambda log, known: known)


def begin_where_the_first_file_does(patch: pytest.MonkeyPatch) -> None:
    """A defect: a log begins with its first file."""
    patch.setattr(recover, "missing_files", lambda log, start, end: [])


@pytest.mark.parametrize(
    ("defect", "harm"), [(believe_marks_of_frames_alone, overwrite), (begin_where_the_first_file_does, remove_files)]
)
def test_the_check_notices(
    defect: Callable[[pytest.MonkeyPatch], None],
    harm: Harm,
    monkeypatch: pytest.MonkeyPatch,
):
    defect(monkeypatch)
    with pytest.raises(AssertionError, match="messages are lost"):
        check_all(range(4 * LIVES), harm)


def test_retention_moves_the_mark_before_it_removes_files():
    node = Node(retention_seconds=10.0)
    for _ in range(40):
        node.send("orders", bytes(1_000))
    node.clock.advance(20)
    for _ in range(6):
        node.checkpoint()
    assert node.retention.run()
    assert node.broker.message_log.mark == DurableMark(node.broker.message_log.start, node.broker.message_log.durable)
    assert node.broker.message_log.start > 0
    assert not node.killed().report.damages
