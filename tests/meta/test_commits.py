"""Batches of sinks: the meta server decides each batch once, and the next one only when it is published (R23)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from plait.clock import ManualClock
from plait.errors import InvalidArgument, StaleSession, TooLarge
from plait.limits import COMMIT_STAGES_MAX, MetaLimits
from plait.meta.batch_commits import VETOES_MAX, Stages
from plait.meta.service import MetaService
from tests.meta.support import Stores

DAY = 86_400


def stages(*producers: int) -> Stages:
    return [("g1", "orders", [(producer, 10) for producer in producers])]


def test_the_first_decision_on_a_batch_stands(service: MetaService):
    commits = service.commits
    first = commits.decide("q", 0, stages(1, 2))
    assert (first.batch, first.stages, first.done) == (0, stages(1, 2), False)
    assert commits.decide("q", 0, stages(3)) == first
    assert commits.done("q", 0, first.version)
    assert commits.decide("q", 0, stages(4)).done
    assert commits.decide("q", 0, stages(4)).stages == stages(1, 2)


def test_a_batch_waits_for_the_one_before_it(service: MetaService):
    commits = service.commits
    first = commits.decide("q", 0, stages(1))
    assert commits.decide("q", 1, stages(2)) == first
    assert commits.done("q", 0, first.version)
    second = commits.decide("q", 1, stages(2))
    assert (second.batch, second.stages) == (1, stages(2))


def test_an_old_batch_is_committed_already(service: MetaService):
    commits = service.commits
    decision = commits.decide("q", 5, stages(1))
    assert commits.decide("q", 4, stages(2)) == decision
    assert commits.done("q", 4, 17)
    assert not commits.decide("q", 5, stages(3)).done


def test_a_batch_without_rows_is_done_at_once(service: MetaService):
    assert service.commits.decide("q", 0, []).done
    assert service.commits.decide("q", 1, stages(1)).batch == 1


def test_a_cancelled_attempt_is_not_committed_later(service: MetaService):
    commits = service.commits
    assert commits.veto("q", 0, 1) is None
    with pytest.raises(StaleSession, match="batch 0 of query q was cancelled"):
        commits.decide("q", 0, stages(1, 2))
    assert commits.decide("q", 0, stages(3)).stages == stages(3)


def test_cancelling_a_committed_batch_changes_nothing(service: MetaService):
    commits = service.commits
    decision = commits.decide("q", 0, stages(1, 2))
    assert commits.veto("q", 0, 2) == decision
    assert commits.veto("q", 0, 3) is None
    assert commits.decide("q", 0, stages(4)) == decision


def test_cancelling_a_committed_batch_changes_nothing_after_its_stages_were_exchanged(service: MetaService):
    """The driver knows the stages that it committed, not the stages that hold their rows now."""
    commits = service.commits
    decision = commits.decide("q", 0, stages(1, 2))
    for version, producer in ((1, 3), (2, 4)):
        commits.exchange("q", 0, version, stages(producer))
    newest = commits.decide("q", 0, [])
    assert newest.stages == stages(4)
    assert commits.veto("q", 0, 1) == commits.veto("q", 0, 2) == newest
    assert commits.done("q", 0, newest.version)
    commits.decide("q", 1, stages(5))
    assert commits.veto("q", 1, 1) is None
    assert decision.version == 1


def test_only_the_newest_cancellations_are_remembered(service: MetaService):
    for producer in range(VETOES_MAX + 1):
        service.commits.veto("q", 0, producer)
    with pytest.raises(StaleSession):
        service.commits.decide("q", 0, stages(VETOES_MAX))
    assert service.commits.decide("q", 0, stages(0)).stages == stages(0)


def test_a_caller_with_old_stages_cannot_report_a_batch_as_done(service: MetaService):
    commits = service.commits
    old = commits.decide("q", 0, stages(1))
    new = commits.exchange("q", 0, old.version, stages(2))
    assert new is not None
    assert not commits.done("q", 0, old.version)
    assert commits.exchange("q", 0, old.version, stages(3)) is None
    assert commits.decide("q", 0, stages(4)).stages == stages(2)
    assert commits.done("q", 0, new.version)
    assert commits.exchange("q", 0, new.version, stages(3)) is None


def test_exchanging_stages_is_idempotent(service: MetaService):
    """If the result were None, the caller would believe that other stages are in force, and drop its own."""
    commits = service.commits
    old = commits.decide("q", 0, stages(1))
    new = commits.exchange("q", 0, old.version, stages(2))
    assert new is not None
    assert commits.exchange("q", 0, old.version, stages(2)) == new
    assert commits.done("q", 0, new.version)
    again = commits.exchange("q", 0, old.version, stages(2))
    assert again is not None
    assert again.done
    assert commits.exchange("q", 0, old.version, stages(3)) is None


def test_a_query_is_forgotten_30_days_after_its_last_request(service: MetaService, clock: ManualClock):
    commits = service.commits
    commits.done("q", 0, commits.decide("q", 0, stages(1)).version)
    clock.advance(29 * DAY)
    commits.decide("other", 0, [])
    assert commits.decide("q", 0, stages(2)).stages == stages(1)
    clock.advance(31 * DAY)
    commits.decide("other", 1, [])
    assert commits.decide("q", 0, stages(2)).stages == stages(2)


@pytest.mark.parametrize("days", [31, 20_000, -20_000])
@pytest.mark.parametrize("first", ["the wrong clock", "the right clock"])
def test_a_decision_stands_though_the_clocks_of_the_meta_servers_differ(stores: Stores, days: int, first: str):
    """One clock is a month ahead, or starts in 1970. Either meta server may decide first; both are asked again."""
    wrong, right = ManualClock(), ManualClock()
    wrong.jump(days * DAY)
    services = [
        MetaService(stores(), clock, MetaLimits())
        for clock in ((wrong, right) if first == "the wrong clock" else (right, wrong))
    ]
    decision = services[0].commits.decide("q", 0, stages(1))
    for service in (*services, *services):
        assert service.commits.decide("q", 0, stages(2)) == decision
        assert service.commits.undone(10) == []
    wrong.jump(-days * DAY)
    right.jump(days * DAY)
    for service in services:
        assert service.commits.decide("q", 0, stages(3)) == decision
    assert services[1].commits.done("q", 0, decision.version)
    assert services[0].commits.decide("q", 0, stages(4)).done
    # The age of the cluster advances for both when one of them counts it.
    right.advance(31 * DAY)
    for service in services:
        service.commits.decide("other", 0, [])
    assert services[0].commits.decide("q", 0, stages(5)).stages == stages(5)


def test_the_clusters_age_is_never_ahead_of_elapsed_time(stores: Stores):
    clocks = [ManualClock() for _ in range(3)]
    services = [MetaService(stores(), clock, MetaLimits()) for clock in clocks]
    services[0].commits.decide("q", 0, stages(1))
    for turn in range(60):
        for clock in clocks:
            clock.advance(35 * 3600)
        services[turn % 3].commits.decide("other", turn, [])
        if turn * 35 < 30 * 24 - 70:
            assert services[0].commits.decide("q", 0, stages(2)).stages == stages(1)
    assert services[0].commits.decide("q", 0, stages(2)).stages == stages(2)


def test_an_unfinished_batch_is_listed_after_a_minute(service: MetaService, clock: ManualClock):
    commits = service.commits
    left = commits.decide("q", 0, stages(1))
    commits.done("r", 0, commits.decide("r", 0, stages(2)).version)
    assert commits.undone(10) == []
    clock.advance(61)
    assert commits.undone(10) == [left]
    commits.done("q", 0, left.version)
    assert commits.undone(10) == []


def test_all_unfinished_batches_are_listed_page_by_page(service: MetaService, clock: ManualClock):
    left = [service.commits.decide(f"q{n}", 0, stages(n)) for n in range(5)]
    clock.advance(61)
    assert service.commits.undone(2) == left[:2]
    assert service.commits.undone(2, after="q1") == left[2:4]
    assert service.commits.undone(2, after="q3") == left[4:]
    assert service.commits.undone(2, after="q4") == []


def test_a_cancellation_does_not_prolong_an_unfinished_batch(service: MetaService, clock: ManualClock):
    """Otherwise brokers would forget that the batch's stages have expired, and treat them as published."""
    commits = service.commits
    left = commits.decide("q", 0, stages(1))
    clock.advance(29 * DAY)
    assert commits.veto("q", 0, 2) is None
    assert commits.undone(10) == [left]
    clock.advance(2 * DAY)
    assert commits.decide("q", 0, stages(3)).stages == stages(3)


def test_a_cancellation_of_an_unfinished_batch_is_remembered(service: MetaService):
    commits = service.commits
    left = commits.decide("q", 0, stages(1))
    assert commits.veto("q", 1, 2) is None
    assert commits.done("q", 0, left.version)
    with pytest.raises(StaleSession):
        commits.decide("q", 1, stages(2))


def test_a_cancellation_of_the_batch_after_a_finished_one_is_remembered_as_long_as_any(
    service: MetaService, clock: ManualClock
):
    commits = service.commits
    commits.done("q", 0, commits.decide("q", 0, stages(1)).version)
    clock.advance(29 * DAY)
    assert commits.veto("q", 1, 2) is None
    clock.advance(2 * DAY)
    with pytest.raises(StaleSession):
        commits.decide("q", 1, stages(2))


def test_a_batch_that_is_too_old_is_not_returned_even_if_nothing_was_written_since(
    service: MetaService, clock: ManualClock
):
    commits = service.commits
    left = commits.decide("q", 0, stages(1))
    clock.advance(31 * DAY)
    assert commits.undone(10) == []
    assert commits.exchange("q", 0, left.version, stages(2)) is None
    assert commits.decide("q", 0, stages(3)).stages == stages(3)


def test_impossible_batches_are_refused(service: MetaService):
    with pytest.raises(InvalidArgument, match="batch -1"):
        service.commits.decide("q", -1, [])
    with pytest.raises(TooLarge, match=r"coalesce\(\)"):
        service.commits.decide("q", 0, stages(*range(COMMIT_STAGES_MAX + 1)))


def test_of_many_concurrent_decisions_one_wins(stores: Stores, clock: ManualClock):
    services = [MetaService(stores(), clock, MetaLimits()) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: services[n].commits.decide("q", 0, stages(n)), range(4)))
    assert len({str(decision.stages) for decision in found}) == 1
