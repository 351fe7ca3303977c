"""Another thread writes the leaves of clients, many at a time, while the meta server decides."""

from __future__ import annotations

import pytest

from plait.clock import ManualClock
from plait.errors import MetaUnavailable
from plait.limits import LOGICAL_PARTITIONS, MetaLimits
from plait.meta.service import MetaService
from tests.meta.support import Stores, join, lps, register, settle, share


def members(service: MetaService) -> set[str]:
    return set(service.allocator.view("s", "g").members)


def test_leaves_that_arrive_together_are_one_change(subject: MetaService):
    for client in ("c1", "c2", "c3", "c4"):
        join(subject, client)
    settle(subject)
    before = subject._core.mirror.seen
    leaves = [subject.members.leave(client) for client in ("c1", "c2", "c3")]
    subject.members.leaving.carry_out(leaves[0])
    assert all(leave.done for leave in leaves)
    for leave in leaves:
        assert subject.members.left(leave).shares == []
    assert subject._core.mirror.seen == before + 1
    assert members(subject) == {"c4"}
    settle(subject)
    assert lps(share(join(subject, "c4")).lps) == LOGICAL_PARTITIONS


def test_one_change_has_no_more_leaves_than_can_be_applied_quickly(stores: Stores, clock: ManualClock):
    service = MetaService(stores(), clock, MetaLimits(write_members=2))
    register(service, "g1")
    service.subjects.create("s")
    for client in ("c1", "c2", "c3", "c4"):
        join(service, client)
    leaves = [service.members.leave(client) for client in ("c1", "c2", "c3", "c4")]
    service.members.leaving.carry_out(leaves[0])
    assert [leave.done for leave in leaves] == [True, True, False, False]
    # Waiting for the last leave includes all earlier ones.
    service.members.left(leaves[3])
    assert all(leave.done for leave in leaves)
    assert members(service) == set()


@pytest.mark.parametrize("written", [False, True], ids=["before", "after"])
def test_a_client_that_returns_before_its_leave_is_written_is_a_member(subject: MetaService, written: bool):
    join(subject, "c1")
    settle(subject)
    leave = subject.members.leave("c1")
    if written:
        subject.members.leaving.carry_out(leave)
    join(subject, "c1")
    subject.members.leaving.carry_out(leave)
    subject.members.left(leave)
    settle(subject)
    assert lps(share(join(subject, "c1")).lps) == LOGICAL_PARTITIONS


def test_a_written_leave_is_known_even_if_its_end_is_not_called(subject: MetaService):
    join(subject, "c1")
    join(subject, "c2")
    settle(subject)
    subject.members.leaving.carry_out(subject.members.leave("c2"))
    settle(subject)
    assert members(subject) == {"c1"}
    assert lps(share(join(subject, "c1")).lps) == LOGICAL_PARTITIONS


def test_a_repeated_leave_is_confirmed_again(subject: MetaService):
    join(subject, "c1")
    leaves = [subject.members.leave("c1"), subject.members.leave("c1")]
    for leave in leaves:
        assert subject.members.left(leave).seen == 0
    assert subject.members.left(subject.members.leave("c1")).seen == 0
    assert members(subject) == set()


def test_a_failed_write_is_reported_to_every_leaving_client_and_can_be_retried(
    subject: MetaService, monkeypatch: pytest.MonkeyPatch
):
    join(subject, "c1")
    join(subject, "c2")
    leaves = [subject.members.leave("c1"), subject.members.leave("c1"), subject.members.leave("c2")]

    def down() -> None:
        raise MetaUnavailable("the database is down")

    with monkeypatch.context() as patch:
        patch.setattr(subject._core.store.database, "writing", down)
        subject.members.leaving.carry_out(leaves[0])
    for leave in leaves:
        with pytest.raises(MetaUnavailable, match="is down"):
            subject.members.left(leave)
    with pytest.raises(MetaUnavailable, match="is down"):
        subject.members.leave("c1")
    subject.tick()
    assert members(subject) == {"c1", "c2"}
    subject.members.left(subject.members.leave("c1"))
    assert members(subject) == {"c2"}
