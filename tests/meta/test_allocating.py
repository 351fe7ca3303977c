"""Another thread writes allocations while the meta server decides. No interleaving results in a wrong allocation."""

from __future__ import annotations

import threading

import pytest

from plait.clock import ManualClock
from plait.errors import MetaUnavailable
from plait.limits import LOGICAL_PARTITIONS
from plait.meta.members.allocator import AllocationWrite
from plait.meta.service import MetaService
from tests.meta.support import Stores, join, lps, settle, share


def to_write(service: MetaService) -> AllocationWrite:
    """The computed allocation, before it is written."""
    while service.allocator.writing is None:
        assert service.step().more
    return service.allocator.writing


def test_heartbeats_are_answered_while_another_thread_writes(subject: MetaService):
    join(subject, "c1")
    settle(subject)
    join(subject, "c2")
    before = join(subject, "c1")
    writing = to_write(subject)
    begun, answered = threading.Event(), threading.Event()
    in_time = []

    def write() -> None:
        with subject._core.store.change():
            begun.set()
            in_time.append(answered.wait(3))
        writing.carry_out()

    thread = threading.Thread(target=write)
    thread.start()
    assert begun.wait(30)
    assert join(subject, "c1") == before
    answered.set()
    thread.join()
    assert in_time == [True]
    # The meta server reads the written allocation in its next step.
    assert join(subject, "c1") == before
    settle(subject)
    assert lps(share(join(subject, "c1")).lps) == lps(share(join(subject, "c2")).lps) == LOGICAL_PARTITIONS // 2


@pytest.mark.parametrize("written", [False, True], ids=["before", "after"])
def test_membership_changes_during_a_write_are_in_the_next_allocation(subject: MetaService, written: bool):
    join(subject, "c1")
    writing = to_write(subject)
    if written:
        writing.carry_out()
    join(subject, "c2")
    writing.carry_out()
    settle(subject)
    members = subject.allocator.view("s", "g").members
    assert {client: lps(runs) for client, runs in members.items()} == {"c1": 512, "c2": 512}


def test_an_allocation_that_another_meta_server_wrote_first_wins(
    subject: MetaService, stores: Stores, clock: ManualClock
):
    join(subject, "c1")
    writing = to_write(subject)
    other = MetaService(stores(), clock)
    join(other, "c2")
    settle(other)
    writing.carry_out()
    settle(subject)
    settle(other)
    assert subject.allocator.view("s", "g") == other.allocator.view("s", "g")
    assert {lps(runs) for runs in subject.allocator.view("s", "g").members.values()} == {512}


def test_a_failed_write_is_reported_and_retried(subject: MetaService, monkeypatch: pytest.MonkeyPatch):
    join(subject, "c1")
    writing = to_write(subject)

    def down() -> None:
        raise MetaUnavailable("the database is down")

    with monkeypatch.context() as patch:
        patch.setattr(subject._core.store.database, "writing", down)
        writing.carry_out()
    with pytest.raises(MetaUnavailable, match="is down"):
        subject.step()
    with pytest.raises(MetaUnavailable, match="is down"):
        join(subject, "c1")
    subject.tick()
    settle(subject)
    assert lps(share(join(subject, "c1")).lps) == LOGICAL_PARTITIONS
