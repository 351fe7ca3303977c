"""A lasting state is logged when it begins and when it ends, not at every check."""

from __future__ import annotations

import logging

import pytest

from plait.server.notices import Notices

log = logging.getLogger("plait.test")


def test_the_begin_and_the_end_of_a_state_are_logged_once(caplog: pytest.LogCaptureFixture):
    notices = Notices(log)
    for free in (5, 4, 3):
        notices.begin("disk", f"{free} MiB are free", kind="full")
    notices.begin("disk", "the disk does not answer")
    for _ in range(2):
        notices.end("disk", "there is space again")
    notices.begin("disk", "2 MiB are free", kind="full")
    assert caplog.messages == [
        "5 MiB are free",
        "the disk does not answer",
        "there is space again",
        "2 MiB are free",
    ]


def test_states_are_separate_and_a_bounded_number_is_remembered(caplog: pytest.LogCaptureFixture):
    notices = Notices(log, most=2)
    for _ in range(3):
        notices.begin("a", "a fails: 1", "kind")
        notices.begin("b", "b fails: 1", "kind")
    notices.end("a")
    notices.begin("a", "a fails: 2", "kind")
    notices.begin("c", "c fails", "kind")
    notices.begin("b", "b fails: 2", "kind")
    assert caplog.messages == ["a fails: 1", "b fails: 1", "a fails: 2", "c fails", "b fails: 2"]
