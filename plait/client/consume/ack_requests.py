"""Splits acks and nacks into requests of at most as many ranges as a broker accepts in one."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from plait.limits import FAILED_RANGES_MAX, REQUEST_RANGES_MAX
from plait.wire import messages as m


def split_ack(ack: m.AckRequest) -> Iterator[m.AckRequest]:
    """Yield the ack as requests of at most ``REQUEST_RANGES_MAX`` ranges; none if it has no ranges."""
    for part in _parts(len(ack.ranges), REQUEST_RANGES_MAX):
        yield replace(ack, ranges=ack.ranges[part], tags=ack.tags[part])


def split_nack(nack: m.NackRequest) -> Iterator[m.NackRequest]:
    """Yield the nack as one or more requests of at most ``FAILED_RANGES_MAX`` ranges.

    Returns, which count no attempt, may have ``REQUEST_RANGES_MAX`` ranges.
    """
    most = FAILED_RANGES_MAX if nack.counted else REQUEST_RANGES_MAX
    if len(nack.ranges) + len(nack.lp_ranges) <= most:
        yield nack
        return
    for part in _parts(len(nack.lp_ranges), most):
        lp_ranges, lp_tags = nack.lp_ranges[part], nack.lp_tags[part]
        yield replace(nack, ranges=[], tags=[], lp_ranges=lp_ranges, lp_tags=lp_tags)
    for part in _parts(len(nack.ranges), most):
        ranges, tags = nack.ranges[part], nack.tags[part]
        yield replace(nack, ranges=ranges, tags=tags, lps=[], lp_ranges=[], lp_tags=[])


def _parts(count: int, most: int) -> Iterator[slice]:
    return (slice(start, start + most) for start in range(0, count, most))
