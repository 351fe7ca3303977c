"""Random numbers: unpredictable by default, repeatable with a seeded source."""

from __future__ import annotations

import os
import random

import pytest

from plait import chance


@pytest.fixture
def seeded():
    before = chance.use(random.Random(5))
    yield
    chance.use(before)


def draws() -> list[object]:
    return [chance.bits(63), chance.token(6), chance.uniform(1.0, 2.0), chance.process_number()]


def test_a_seeded_source_is_repeatable(seeded: None):
    first = draws()
    chance.use(random.Random(5))
    assert draws() == first


def test_the_default_source_is_not_repeatable():
    assert chance.bits(63) != chance.bits(63)
    assert chance.process_number() == os.getpid()


def test_a_token_has_two_digits_per_byte():
    assert all(len(chance.token(6)) == 12 for _ in range(200))


def test_use_returns_the_previous_source():
    mine = random.Random(1)
    assert chance.use(mine) is None
    assert chance.use(None) is mine
