"""Defects of limits of messages and bytes a second. When one is patched in, a generator must fail."""

from __future__ import annotations

import pytest

from plait.broker.groups.group import Group
from plait.broker.groups.limited_delivery import OpeningRates
from plait.broker.partition_rate import PartitionRate
from plait.model.rate import Rate

Patch = pytest.MonkeyPatch


def begin_with_a_second_of_tokens(patch: Patch) -> None:
    """A limit is full after a start of the broker and after each change, whatever was delivered before."""
    begin = PartitionRate.__init__

    def naive(self: PartitionRate, rate: Rate, share: float) -> None:
        begin(self, rate, share)
        for bucket in self._buckets:
            bucket.level = bucket.rate * share
        self._closed = False

    patch.setattr(PartitionRate, "__init__", naive)


def leave_limited_pulls_suspended(patch: Patch) -> None:
    """No timer serves the suspended pulls of a limited group: they wait for the next message or their time-out."""

    def naive(self: OpeningRates, group: Group, due: float) -> None:
        pass

    patch.setattr(OpeningRates, "expect", naive)
