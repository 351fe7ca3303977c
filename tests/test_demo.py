"""The demo as a process: its table, its exit code, and its cleanup."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest

from examples.demo.delayed import Delayed
from examples.demo.desk import Desk
from examples.demo.ledger import Ledger
from examples.demo.orders import HANDLED, STEPS, Event, events
from examples.demo.processes import DemoFailed

#: Longer than the demo takes while other tests use the processors; a part that hangs ends the demo sooner.
SECONDS = 280.0
HAS_SPARK = find_spec("pyspark") is not None


def demo(directory: Path, *arguments: str, spark: bool = False) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "examples.demo", *([] if spark else ["--no-spark"]), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(directory)},
    )


def test_a_small_demo_loses_no_message_and_leaves_no_files(tmp_path: Path):
    size = ("--orders", "1500", "--producers", "2", "--seconds", "1.5", "--ordered", "300")
    with demo(tmp_path, *size, spark=HAS_SPARK) as process:
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err) == (0, ""), out
    assert re.search(r"killed billing-\d \(SIGKILL\) with [1-9][\d,]* messages in flight", out)
    assert re.search(
        r"failed 3 times became a dead letter \(ValueError: amount 'five' is not a number \(.*invoice\)\)", out
    )
    assert "45 database transactions with an outbox row were committed" in out
    assert "got the 50 messages that match; the node left out 950 others" in out
    assert (
        "a transaction sent to order.placed and stock.reserved: nothing was visible before its commit, all 2 messages"
        in out
    )
    delays = re.search(
        r"(\d+) delayed messages arrived [\d.]+ ms after their due time .*, none early; (\d+) were cancelled", out
    )
    assert delays is not None
    assert int(delays[1]) + int(delays[2]) == 1_000
    table, _, verdict = out[out.index("result") :].partition("  audit: ")
    if HAS_SPARK:
        check_pipeline(out)
        assert re.search(r"^ Spark +12,000 +12,000 +0 +yes *$", table, re.MULTILINE)
        assert verdict == "every promise was kept\n"
    for group in ("billing", "audit"):
        row = next(line.split() for line in table.splitlines() if line.split()[:1] == [group])
        sent, consumed, redelivered, _, lost, kept = row[1:7]
        assert (sent, consumed, lost, kept) == ("12,000", "12,000", "0", "yes,")
        assert (redelivered != "0") == (group == "billing")
    assert "each order's events in order: order violations = 0" in table
    last = next(line for line in reversed(table.splitlines()) if re.match(r" +300 ", line))
    orders, events, lost, *_, handovers = last.replace(",", "").split()
    assert (orders, events, lost) == ("300", "1200", "0")
    assert int(handovers) > 0
    for partitions in (4, 7, 3):
        assert f"ordered: {partitions} partitions from now on" in out
    assert list(tmp_path.iterdir()) == []


def check_pipeline(out: str) -> None:
    """Check that Spark counted, archived and audited every message that was sent."""
    assert "Spark counted 12,000 messages of 3,000 orders" in out
    archived = re.search(r"archived ([\d,]+) messages and [\d,]+ events in [\d,]+ files", out)
    audited = re.search(r"audited ([\d,]+) messages of 9 subjects in 10 groups: [\d,]+ acks, .* 1 dead letter", out)
    assert archived is not None
    assert audited is not None
    # Includes the ordered, failed, dead, delayed, outbox, filtered and transacted messages.
    assert archived[1] == audited[1]
    assert int(archived[1].replace(",", "")) >= 12_000 + 1_200 + 200 + 1 + 900 + 45 + 1_000 + 2
    assert re.search(r"history of order-0-0 in \d+ ms, without Java: created, paid, pushed, done", out)


def test_an_interrupted_demo_ends_its_processes_and_removes_its_files(tmp_path: Path):
    with demo(tmp_path, "--orders", "100000", "--seconds", "60") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "producers, " in line:
                break
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 5
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert psutil.wait_procs(children, timeout=0)[1] == []
    assert list(tmp_path.iterdir()) == []


def test_invalid_arguments_print_one_line(tmp_path: Path):
    with demo(tmp_path, "--orders", "0") as process:
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (2, "")
    assert err == "error: --orders must be 1 or more, not 0 (invalid_argument)\n"


def test_events_of_an_order_are_in_order_and_interleaved_with_other_orders():
    sent = list(events(1, 120))
    assert [event.number for event in sent] == list(range(120 * len(STEPS)))
    of_one = [event for event in sent if event.order == "order-1-60"]
    assert [event.step for event in of_one] == list(STEPS)
    assert of_one[1].number - of_one[0].number > 1
    assert sent[0] == Event("order-1-0", "created", 1, 0)


def handled(numbers: list[int], attempt: int = 1) -> bytes:
    rows = [(number, number, 0, attempt) for number in numbers]
    return np.array(rows, HANDLED).tobytes()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger("billing", producers=1, orders=1)


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        ([("a", [0, 2]), ("b", [1, 3])], (True, 4, 0, 0)),
        ([("a", [0, 1, 3])], (False, 3, 1, 0)),
        ([("a", [0, 2, 1, 3])], (False, 4, 0, 1)),
    ],
    ids=["complete", "a lost message", "out of order"],
)
def test_a_ledger_finds_lost_messages_and_those_out_of_order(
    ledger: Ledger, received: list[tuple[str, list[int]]], expected: tuple[bool, int, int, int]
):
    for consumer, numbers in received:
        ledger.add(consumer, handled(numbers))
    result = ledger.result()
    assert (result.right, result.distinct, result.lost, result.order_checked - result.order_kept) == expected


def test_a_ledger_counts_redelivered_messages(ledger: Ledger):
    ledger.add("a", handled([0, 1]))
    ledger.add("b", handled([2, 3]))
    ledger.add("b", handled([0, 1], attempt=2))
    result = ledger.result()
    assert (result.right, result.redelivered, result.twice, result.handled) == (True, 2, 2, 6)


def test_a_ledger_finds_messages_out_of_order_in_the_log(ledger: Ledger):
    rows = [(10, 0, 0, 1), (12, 1, 0, 1), (11, 2, 0, 1), (13, 3, 0, 1)]
    ledger.add("a", np.array(rows, HANDLED).tobytes())
    result = ledger.result()
    assert (result.right, result.order_checked - result.order_kept) == (False, 1)


@pytest.fixture
def desk() -> Desk:
    return Desk(orders=1)


def test_a_complete_desk_in_order_is_right(desk: Desk):
    assert all(desk.take("a", "order-1", step, 1) for step in STEPS)
    assert (desk.complete, desk.result().right, desk.result().handovers) == (True, True, 0)


def test_a_desk_refuses_a_lower_epoch_and_counts_repeated_events(desk: Desk):
    assert desk.take("a", "order-1", "created", 1)
    assert desk.take("b", "order-1", "created", 2)
    assert not desk.take("a", "order-1", "paid", 1)
    result = desk.result()
    assert (result.refused, result.twice, result.handovers, result.violations, result.lost) == (1, 1, 1, 0, 3)


def test_a_desk_finds_a_skipped_step(desk: Desk):
    desk.take("a", "order-1", "created", 1)
    desk.take("a", "order-1", "pushed", 1)
    assert desk.result().violations == 1
    assert not desk.result().right


def test_a_desk_finds_two_consumers_with_one_epoch(desk: Desk):
    desk.take("a", "order-1", "created", 1)
    desk.take("b", "order-1", "paid", 1)
    assert desk.result().violations == 1


def test_a_cancellation_that_is_too_late_is_not_an_error():
    Delayed(951, 49, 0, 0, 1.0, 2.0).check()
    for wrong in (Delayed(950, 49, 0, 0, 1.0, 2.0), Delayed(950, 50, 1, 0, 1.0, 2.0), Delayed(950, 50, 0, 1, 1.0, 2.0)):
        with pytest.raises(DemoFailed, match=r"expected 95[01] messages"):
            wrong.check()
