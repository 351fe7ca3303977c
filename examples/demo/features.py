"""One feature after another, while the producers and groups of the demo run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from examples.demo.dead import show_dead_letter
from examples.demo.delayed import show_delays
from examples.demo.failing import FAILURES, show_retries
from examples.demo.filtered import WHERE, show_filter
from examples.demo.outbox_rows import show_outbox
from examples.demo.transacted import SUBJECTS, show_transactions


async def show_features(address: str, directory: Path) -> AsyncIterator[str]:
    """What each feature did, in a sentence; ``DemoFailed`` if a check fails."""
    retried = await show_retries(address)
    retried.check()
    yield (
        f"a handler failed {FAILURES} times on each of {retried.messages:,} messages, each redelivered when due: "
        f"{retried.calls:,} calls, none early, all done"
    )
    letter = await show_dead_letter(address)
    yield (
        f"a message that failed {letter.attempts} times became a dead letter ({letter.reason}); "
        "the handler was fixed, the letter resent and handled"
    )
    delayed = await show_delays(address)
    delayed.check()
    yield (
        f"{delayed.messages:,} delayed messages arrived {delayed.p50:.1f} ms after their due time "
        f"(p99 {delayed.p99:.1f} ms), none early; {delayed.cancelled} were cancelled and did not arrive"
    )
    booked = await show_outbox(address, directory)
    booked.check()
    yield (
        f"{len(booked.committed)} database transactions with an outbox row were committed, and each message was "
        f"handled once, in order; {booked.rolled_back} rolled back ones sent nothing"
    )
    filtered = await show_filter(address)
    filtered.check()
    yield (
        f"a group with where={WHERE!r} got the {len(filtered.received)} messages that match; the node left out "
        f"{filtered.left_out:,} others, which count as consumed"
    )
    decided = await show_transactions(address)
    decided.check()
    yield (
        f"a transaction sent to {' and '.join(SUBJECTS)}: nothing was visible before its commit, all "
        f"{len(decided.committed)} messages after it; a rolled back one published nothing"
    )
