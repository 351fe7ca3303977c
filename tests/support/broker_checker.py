"""What must hold after any crash of a broker, checked on what the crash left.

``check`` starts a broker on the disk that was found and compares it with what the outsiders of a ``Trace`` were told:
nothing acknowledged is lost, nothing is invented, changed or stored twice, everybody's order is kept, what was acked
stays acked, and whatever is left can be sent again and consumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from plait.broker.groups.dead_letters import Choice
from plait.broker.groups.shared_group import Group
from plait.clock import ManualClock
from plait.storage.checkpoint import KEEP
from plait.storage.logs.consume_log import DIRECTORY as CONSUME
from plait.testing.simulated_disk import SimulatedDisk
from tests.support.broker_node import Node, Row, Sent
from tests.support.broker_trace import GROUPS, GroupTold, Told, Trace

BATCH = 1 << 20

Stored = dict[str, list[Row]]


def check(
    disk: SimulatedDisk, trace: Trace, *, drained: int = 0, all_written: bool = True, flipped: bool = False
) -> None:
    """Recover and compare. ``drained`` picks the group that is consumed to its end.

    ``all_written``: the crash could take nothing that was acknowledged. Otherwise (a power loss with
    ``flush="async"``) only what was synced has to be there, and the rest must still be right. ``flipped``: a frame of
    the catalog is damaged.
    """
    told = trace.look()
    node = Node(disk, ManualClock(trace.clock.now()), trace.config)
    if told.epoch:
        assert node.broker.epoch > told.epoch, "an unclean start goes on in the old epoch"
    damages = [damage for damage in node.report.damages if damage.kind != "torn"]
    assert len(damages) <= flipped, "a crash is no damage"
    stored = everything(node)
    certain = [frame for frame in told.frames if frame.acknowledged] if all_written else told.durable_frames
    check_rows(told, stored)
    check_certain(told, certain, stored)
    check_beginnings(told, stored)
    for subject, there in told.subjects.items():
        assert there is None or (subject in stored) == there, f"subject {subject} came back or is gone"
    groups = check_groups(told, node, all_written=all_written)
    ends = {subject: partition.next for subject, partition in node.broker.subjects.items()}
    if all_written:
        send_again(told, node)
    if drained % 4 == 0:
        check_next_start(node, trace)
    if groups:
        key = sorted(groups)[drained % len(groups)]
        drain(told, key, node, groups[key], ends[key[0]], all_written=all_written)
    if drained % 8 == 3:
        check_files(node)


@contextmanager
def served(
    disk: SimulatedDisk, trace: Trace, number: int, *, crash: Callable[[SimulatedDisk], SimulatedDisk]
) -> Iterator[SimulatedDisk]:
    """Start on a disk, serve senders and a consumer, then crash; the disk that is left, and what was told meanwhile.

    Everything that this start acknowledges is durable: the senders' frames, and acks in one group.
    """
    told = trace.look()
    node = Node(disk, ManualClock(trace.clock.now()), trace.config)
    again = [node.submit(Sent(frame.subject, frame.data, frame.bodies)) for frame in told.unacknowledged]
    node.turn()
    group_told, acked = _ack_some(told, node, number)
    node.sync()
    assert node.broker.failed is None
    told.frames += again
    before = group_told.ack_asked, group_told.ack_acknowledged
    group_told.ack_asked = before[0] | acked
    group_told.ack_acknowledged = before[1] | acked
    try:
        yield crash(node.disk)
    finally:
        group_told.ack_asked, group_told.ack_acknowledged = before
        del told.frames[len(told.frames) - len(again) :]


def _ack_some(told: Told, node: Node, number: int) -> tuple[GroupTold, set[int]]:
    """A new consumer of one group acks a few rows."""
    groups = [
        (subject, name)
        for subject, name in sorted(told.groups)
        if subject in node.broker.subjects
        and name in node.broker.subjects[subject].groups
        and "delivery" not in GROUPS.get(name, {"delivery": "broadcast"})
    ]
    if not groups:
        return GroupTold(0, "at_least_once"), set()
    subject, name = groups[number % len(groups)]
    consumer = node.attach(subject, name, "served")
    rows = node.pull(consumer, 5).rows
    assert node.ack(consumer, *((row.sequence, row.sequence + 1, row.epoch) for row in rows)) == [True]
    return told.groups[subject, name], {row.sequence for row in rows}


def everything(node: Node) -> Stored:
    return {subject: node.stored(subject) for subject in node.broker.subjects}


def check_rows(told: Told, stored: Stored) -> None:
    """Nothing is invented or changed or there twice, and every producer's order is kept."""
    assert not any(frame.acknowledged for frame in told.forged), "other rows are taken for a resend of stored ones"
    for subject, rows in stored.items():
        last: dict[int, int] = {}
        for row in rows:
            known = (row.producer, row.number)
            assert told.rows.get(known) == (subject, row.body), f"{subject}: {known} is not what was sent"
            before = last.get(row.producer, 0)
            assert before < row.number, f"{subject}: {known} comes after {before}"
            last[row.producer] = row.number


def check_certain(told: Told, certain: Iterable[Sent], stored: Stored) -> None:
    """Every row is where its receipt says, unless retention took it."""
    places = {(row.producer, row.number): (subject, row.sequence) for subject, rows in stored.items() for row in rows}
    for frame in certain:
        sequence = frame.sequence
        assert sequence is not None
        expired = told.expired.get(frame.subject, 0)
        for row in range(len(frame.bodies)):
            known = (frame.view.producer, frame.view.first + row)
            found = places.get(known)
            if found is None and sequence + row < expired:
                continue
            assert found == (frame.subject, sequence + row), f"{known}, acknowledged as {sequence + row}, is {found}"


def check_beginnings(told: Told, stored: Stored) -> None:
    """Of what each producer sent to a subject a beginning is stored, without holes."""
    present = {(row.producer, row.number) for rows in stored.values() for row in rows}
    missing: set[tuple[str, int]] = set()
    for frame in told.frames:
        expired = frame.acknowledged and (frame.sequence or 0) < told.expired.get(frame.subject, 0)
        for row in range(len(frame.bodies)):
            known = (frame.view.producer, frame.view.first + row)
            if known in present:
                assert (frame.subject, known[0]) not in missing, f"{frame.subject}: {known} follows a missing row"
            elif not expired:
                missing.add((frame.subject, known[0]))


def check_groups(told: Told, node: Node, *, all_written: bool) -> dict[tuple[str, str], Group]:
    """Positions are sane, and acknowledged acks count; the groups that are there."""
    groups: dict[tuple[str, str], Group] = {}
    for key, group_told in told.groups.items():
        subject, name = key
        partition = node.broker.subjects.get(subject)
        group = partition.groups.get(name) if partition is not None else None
        if group is None:
            assert not group_told.durable, f"group {key} is gone"
            continue
        groups[key] = group
        log = group.pull_log
        letters, _ = node.broker.dead_letters.page(group, Choice(), -1, 10_000)
        assert all(found.frame is not None for found in letters), f"{key}: dead letters that cannot be read"
        assert 0 <= log.floor <= log.next <= group.partition.next, f"group {key}: position {log.next}"
        open_rows = {s for r in log.returned for s in range(r.start, r.end)}
        for held in log.held.values():
            for piece in held:
                sequences = range(piece.start, piece.end)
                assert open_rows.isdisjoint(sequences), f"group {key}: rows in two hands"
                open_rows.update(sequences)
        assert all(sequence < log.next for sequence in open_rows), f"group {key}: rows ahead of its position"
        if all_written:
            done = group_told.done
            assert open_rows.isdisjoint(done), f"group {key}: acknowledged acks are open again"
            assert not done or max(done) < log.next, f"group {key}: acknowledged acks are ahead of the position"
    return groups


def send_again(told: Told, node: Node) -> None:
    """Whoever got no answer sends again: everything is stored once, in order."""
    again = [node.submit(Sent(frame.subject, frame.data, frame.bodies)) for frame in told.unacknowledged]
    node.turn()
    stored = {subject: node.stored(subject) for subject in {frame.subject for frame in again}}
    check_rows(told, stored)
    check_certain(told, again, stored)


def check_next_start(node: Node, trace: Trace) -> None:
    """What stands now stands after the next start: nothing of what the crash left comes back."""
    node.turn()
    later = Node(node.disk.copy(), ManualClock(trace.clock.now()), trace.config)
    assert later.report.damages == [], "the crash is still there at the next start"
    assert everything(later) == everything(node), "the next start finds something else"


def check_files(node: Node) -> None:
    """Files that no partition uses are removed once no checkpoint needs them."""
    for number in range(KEEP + 2):
        # A checkpoint that has nothing to write is not made.
        node.attach("orders", "files", f"c{number}")
        node.checkpoint()
    used = {partition.consume_log.path for partition in node.broker.partitions.values()}
    left = {f"{CONSUME}/{name}" for name in node.disk.list(CONSUME)} - used
    assert not left, f"files of deleted partitions are left: {sorted(left)[:5]}"


def drain(told: Told, key: tuple[str, str], node: Node, group: Group, recovered_end: int, *, all_written: bool) -> None:
    """Everything that is not done is handed out once, and nothing else. Rows from ``recovered_end`` on are new."""
    group_told = told.groups[key]
    node.clock.advance(node.broker.limits.consumer_lost_seconds + 1)
    node.membership.lose_silent()
    client = group.name.removeprefix("%broadcast%") if group.definition.broadcast else "drain"
    name = None if group.definition.broadcast else group.name
    consumer = node.attach(key[0], name, client, delivery=group.definition.delivery)
    got: list[int] = []
    everything = np.array([[0, 1 << 60]])
    kept = {sequence for _, sequences in group.kept.by_offset(everything) for sequence in sequences.tolist()}
    letters, _ = node.broker.dead_letters.page(group, Choice(), -1, 10_000)
    dead = {sequence for found in letters for sequence in found.sequences.tolist()}
    assert dead <= group_told.rejected, f"{key}: dead letters that no consumer rejected"
    assert node.broker.dead_letters.resend(group, letters) == len(dead)
    # Whatever failed has waited long enough.
    node.later(800.0)
    while (pulled := node.pull(consumer, BATCH, BATCH)).ranges:
        for row in pulled.rows:
            assert told.rows.get((row.producer, row.number)) == (key[0], row.body), f"{key}: {row} is not what was sent"
        for start, end, _ in pulled.ranges:
            got += range(start, end)
            node.broker.ack(consumer, [(start, end, epoch) for _, epoch in group.partition.epochs], None)
    assert len(set(got)) == len(got), f"{key}: handed out twice"
    rows = {row.sequence for row in node.stored(key[0])}
    assert (rows | kept).issuperset(got), f"{key}: rows that do not exist"
    if all_written:
        assert group_told.done.isdisjoint(got), f"{key}: done rows come again"
    doubtful = {sequence for sequence in group_told.doubtful if sequence < recovered_end} | group_told.forgotten
    first = max(min(group_told.start, recovered_end), told.expired.get(key[0], 0))
    wanted = {sequence for sequence in rows if sequence >= first} - doubtful
    assert wanted.issubset(got), f"{key}: {sorted(wanted.difference(got))[:5]} are never handed out"
    assert group.pull_log.floor == group.partition.visible, f"{key}: not at its end"
