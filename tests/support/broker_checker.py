"""Checks that a broker keeps its promises after a crash.

``check`` starts a broker on the disk that the crash left, and compares it with what the clients of a ``Trace``
observed:

- no acknowledged row is lost;
- no row is invented, changed or stored twice;
- the rows of every producer are in order;
- acked rows stay acked;
- all other rows can be sent again and consumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from plait.broker.groups.dead_letters import Choice
from plait.broker.groups.group import Group
from plait.clock import ManualClock
from plait.storage.checkpoint import KEEP
from plait.storage.logs.consume_log import DIRECTORY as CONSUME
from plait.testing.simulated_disk import SimulatedDisk
from tests.support.broker_node import Node, Row, Sent
from tests.support.broker_trace import GROUPS, GroupObserved, Observed, Trace

BATCH = 1 << 20

Stored = dict[str, list[Row]]


def check(
    disk: SimulatedDisk, trace: Trace, *, drained: int = 0, all_written: bool = True, flipped: bool = False
) -> None:
    """Start a broker on the disk and compare it with the observations of the trace.

    - ``drained``: a number that chooses the group that is consumed to its end, and which further checks run.
    - ``all_written``: the crash must not have lost acknowledged rows. If False (a power loss with ``flush="async"``),
      only synced rows must be stored, and other stored rows must be consistent.
    - ``flipped``: a frame of the catalog is damaged.
    """
    observed = trace.look()
    node = Node(disk, ManualClock(trace.clock.now()), trace.config)
    if observed.epoch:
        assert node.broker.turn.epoch > observed.epoch, "an unclean start continues the old epoch"
    damages = [damage for damage in node.report.damages if damage.kind != "torn"]
    assert len(damages) <= flipped, "a crash is reported as damage"
    stored = everything(node)
    certain = [frame for frame in observed.frames if frame.acknowledged] if all_written else observed.durable_frames
    check_rows(observed, stored)
    check_certain(observed, certain, stored)
    check_beginnings(observed, stored)
    for subject, there in observed.subjects.items():
        assert there is None or (subject in stored) == there, f"subject {subject} reappeared or is missing"
    groups = check_groups(observed, node, all_written=all_written)
    ends = {subject: partition.next for subject, partition in node.broker.subjects.items()}
    if all_written:
        send_again(observed, node)
    if drained % 4 == 0:
        check_next_start(node, trace)
    if groups:
        key = sorted(groups)[drained % len(groups)]
        drain(observed, key, node, groups[key], ends[key[0]], all_written=all_written)
    if drained % 8 == 3:
        check_files(node)


@contextmanager
def served(
    disk: SimulatedDisk, trace: Trace, number: int, *, crash: Callable[[SimulatedDisk], SimulatedDisk]
) -> Iterator[SimulatedDisk]:
    """Start a broker on a disk, serve senders and a consumer, then crash. Yields the disk after the crash.

    Everything that this broker acknowledges is durable: the senders' frames, and acks in one group. Until the block
    ends, the observations of the trace include these frames and acks.
    """
    observed = trace.look()
    node = Node(disk, ManualClock(trace.clock.now()), trace.config)
    again = [node.submit(Sent(frame.subject, frame.data, frame.bodies)) for frame in observed.unacknowledged]
    node.turn()
    group_seen, acked = _ack_some(observed, node, number)
    node.sync()
    assert node.broker.turn.failed is None
    observed.frames += again
    before = group_seen.ack_asked, group_seen.ack_acknowledged
    group_seen.ack_asked = before[0] | acked
    group_seen.ack_acknowledged = before[1] | acked
    try:
        yield crash(node.disk)
    finally:
        group_seen.ack_asked, group_seen.ack_acknowledged = before
        del observed.frames[len(observed.frames) - len(again) :]


def _ack_some(observed: Observed, node: Node, number: int) -> tuple[GroupObserved, set[int]]:
    """Let a new consumer of one group ack a few rows. Returns the observations of the group, and the acked rows."""
    groups = [
        (subject, name)
        for subject, name in sorted(observed.groups)
        if subject in node.broker.subjects
        and name in node.broker.subjects[subject].groups
        and "delivery" not in GROUPS.get(name, {"delivery": "broadcast"})
    ]
    if not groups:
        return GroupObserved(0, "at_least_once"), set()
    subject, name = groups[number % len(groups)]
    consumer = node.attach(subject, name, "served")
    rows = node.pull(consumer, 5).rows
    assert node.ack(consumer, *((row.sequence, row.sequence + 1, row.epoch) for row in rows)) == [True]
    return observed.groups[subject, name], {row.sequence for row in rows}


def everything(node: Node) -> Stored:
    return {subject: node.stored(subject) for subject in node.broker.subjects}


def check_rows(observed: Observed, stored: Stored) -> None:
    """Check that no row is invented, changed or stored twice, and that every producer's rows are in order."""
    assert not any(frame.acknowledged for frame in observed.forged), "different rows count as a resend of stored ones"
    for subject, rows in stored.items():
        last: dict[int, int] = {}
        for row in rows:
            known = (row.producer, row.number)
            assert observed.rows.get(known) == (subject, row.body), f"{subject}: {known} is not what was sent"
            before = last.get(row.producer, 0)
            assert before < row.number, f"{subject}: {known} comes after {before}"
            last[row.producer] = row.number


def check_certain(observed: Observed, certain: Iterable[Sent], stored: Stored) -> None:
    """Check that every row is at the sequence of its receipt, unless retention removed it."""
    places = {(row.producer, row.number): (subject, row.sequence) for subject, rows in stored.items() for row in rows}
    for frame in certain:
        sequence = frame.sequence
        assert sequence is not None
        expired = observed.expired.get(frame.subject, 0)
        for row in range(len(frame.bodies)):
            known = (frame.view.producer, frame.view.first + row)
            found = places.get(known)
            if found is None and sequence + row < expired:
                continue
            assert found == (frame.subject, sequence + row), f"{known}, acknowledged as {sequence + row}, is {found}"


def check_beginnings(observed: Observed, stored: Stored) -> None:
    """Check that a producer's stored rows of a subject are the first ones of the rows that it sent, without a gap."""
    present = {(row.producer, row.number) for rows in stored.values() for row in rows}
    missing: set[tuple[str, int]] = set()
    for frame in observed.frames:
        expired = frame.acknowledged and (frame.sequence or 0) < observed.expired.get(frame.subject, 0)
        for row in range(len(frame.bodies)):
            known = (frame.view.producer, frame.view.first + row)
            if known in present:
                assert (frame.subject, known[0]) not in missing, f"{frame.subject}: {known} follows a missing row"
            elif not expired:
                missing.add((frame.subject, known[0]))


def check_groups(observed: Observed, node: Node, *, all_written: bool) -> dict[tuple[str, str], Group]:
    """Check that positions are consistent and that rows with a confirmed ack are done. Returns the existing groups."""
    groups: dict[tuple[str, str], Group] = {}
    for key, group_seen in observed.groups.items():
        subject, name = key
        partition = node.broker.subjects.get(subject)
        group = partition.groups.get(name) if partition is not None else None
        if group is None:
            assert not group_seen.durable, f"group {key} is missing"
            continue
        groups[key] = group
        log = group.cursor
        letters, _ = node.broker.dead_letters.page(group, Choice(), -1, 10_000)
        assert all(found.frame is not None for found in letters), f"{key}: dead letters that cannot be read"
        assert 0 <= log.floor <= log.next <= group.partition.next, f"group {key}: position {log.next}"
        open_rows = {s for r in log.returned for s in range(r.start, r.end)}
        for held in log.held.values():
            for piece in held:
                sequences = range(piece.start, piece.end)
                assert open_rows.isdisjoint(sequences), f"group {key}: rows are held twice"
                open_rows.update(sequences)
        assert all(sequence < log.next for sequence in open_rows), f"group {key}: rows after its position"
        if all_written:
            done = group_seen.done
            assert open_rows.isdisjoint(done), f"group {key}: acknowledged acks are open again"
            assert not done or max(done) < log.next, f"group {key}: acknowledged acks are ahead of the position"
    return groups


def send_again(observed: Observed, node: Node) -> None:
    """Resend all frames without an answer, and check that every row is then stored once, in order."""
    again = [node.submit(Sent(frame.subject, frame.data, frame.bodies)) for frame in observed.unacknowledged]
    node.turn()
    stored = {subject: node.stored(subject) for subject in {frame.subject for frame in again}}
    check_rows(observed, stored)
    check_certain(observed, again, stored)


def check_next_start(node: Node, trace: Trace) -> None:
    """Check that the next start finds the same rows, so that nothing that recovery removed reappears."""
    node.turn()
    later = Node(node.disk.copy(), ManualClock(trace.clock.now()), trace.config)
    assert later.report.damages == [], "the next start reports damage again"
    assert everything(later) == everything(node), "the next start finds different rows"


def check_files(node: Node) -> None:
    """Check that files that no partition uses are removed once no checkpoint needs them."""
    for number in range(KEEP + 2):
        # Attach a consumer, because a checkpoint is made only if there is something to write.
        node.attach("orders", "files", f"c{number}")
        node.checkpoint()
    used = {partition.consume_log.path for partition in node.broker.partitions.values()}
    left = {f"{CONSUME}/{name}" for name in node.disk.list(CONSUME)} - used
    assert not left, f"files of deleted partitions are left: {sorted(left)[:5]}"


def drain(
    observed: Observed, key: tuple[str, str], node: Node, group: Group, recovered_end: int, *, all_written: bool
) -> None:
    """Check that the group gets each unfinished row once, and no other row. Rows from ``recovered_end`` on are new."""
    group_seen = observed.groups[key]
    node.clock.advance(node.broker.limits.consumer_lost_seconds + 1)
    node.membership.lose_silent()
    client = group.name.removeprefix("%broadcast%") if group.definition.broadcast else "drain"
    name = None if group.definition.broadcast else group.name
    consumer = node.attach(key[0], name, client, delivery=group.definition.delivery)
    got: list[int] = []
    everything = np.array([[0, 1 << 60]])
    kept = {sequence for _, sequences in group.retained.by_offset(everything) for sequence in sequences.tolist()}
    letters, _ = node.broker.dead_letters.page(group, Choice(), -1, 10_000)
    dead = {sequence for found in letters for sequence in found.sequences.tolist()}
    assert dead <= group_seen.rejected, f"{key}: dead letters that no consumer rejected"
    assert node.broker.dead_letters.resend(group, letters) == len(dead)
    # Wait longer than every retry delay.
    node.later(800.0)
    while (pulled := node.pull(consumer, BATCH, BATCH)).ranges:
        for row in pulled.rows:
            assert observed.rows.get((row.producer, row.number)) == (key[0], row.body), (
                f"{key}: {row} is not what was sent"
            )
        for start, end, _ in pulled.ranges:
            got += range(start, end)
            node.broker.ack(consumer, [(start, end, epoch) for _, epoch in group.partition.epochs], None)
    assert len(set(got)) == len(got), f"{key}: delivered twice"
    rows = {row.sequence for row in node.stored(key[0])}
    assert (rows | kept).issuperset(got), f"{key}: rows that do not exist"
    if all_written:
        assert group_seen.done.isdisjoint(got), f"{key}: done rows are delivered again"
    doubtful = {sequence for sequence in group_seen.doubtful if sequence < recovered_end} | group_seen.forgotten
    first = max(min(group_seen.start, recovered_end), observed.expired.get(key[0], 0))
    wanted = {sequence for sequence in rows if sequence >= first} - doubtful
    assert wanted.issubset(got), f"{key}: {sorted(wanted.difference(got))[:5]} are never delivered"
    assert group.cursor.floor == group.partition.visible, f"{key}: not at its end"
