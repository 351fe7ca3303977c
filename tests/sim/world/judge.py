"""Finds every broken promise in the ledger of a simulated world."""

from __future__ import annotations

from collections import Counter

from plait.testing.checker import Violation, check
from plait.testing.history import History
from tests.sim.world.ledger import DELAYED, Ledger
from tests.sim.world.plan import DOOMED, GroupPlan

#: Kinds of violations that concern order and ownership.
OF_ORDER = ("send_order", "order", "overlap", "epoch", "owners")


def judge(ledger: Ledger, loose: set[str]) -> list[str]:
    """All broken promises; ``loose``: keys of best-tried subjects whose order is no longer promised."""
    # The next send may create a deleted subject again: its messages are not checked.
    groups = [group for group in ledger.plan.groups if group.subject != DOOMED]
    return [text for group in groups for text in _group(ledger, group, loose)]


def _group(ledger: Ledger, group: GroupPlan, loose: set[str]) -> list[str]:
    whole = ledger.histories[group.subject]
    history = History()
    history.faults = whole.faults
    history.handlings = [handling for handling in whole.handlings if handling.group == group.name]
    # Messages sent before the group began, or expired before a delivery, do not count for its order.
    concerns = {handling.value for handling in history.handlings}
    concerns.update(*(ledger.wanted(group, holder) for holder in ledger.holders(group)))
    history.sends = [send for send in whole.sends if send.value in concerns or send.outcome != "ok"]
    strict = ledger.plan.subject(group.subject).order == "strict"
    left_out = [
        f"{group.subject}/{group.name} ({group.mode}): {handling.value} was left out by the filter and is handled"
        for handling in history.handlings
        if group.leaves_out(int(handling.value))
    ]
    if group.mode == "once":
        return left_out + _once(group, history)
    if group.mode == "broadcast":
        return left_out + _lost(ledger, group)
    found = check(history, strict, ordered=group.mode == "ordered", drained=False, moves=True, groups=[group.name])
    if ledger.plan.subject(group.subject).retention is not None:
        # An empty retired partition is removed; a new one of the same name begins with sequence 0.
        found = [violation for violation in found if violation.kind != "send_order"]
    texts = [f"{group.subject}/{group.name} ({group.mode}): {each}" for each in found if _counts(each, strict, loose)]
    texts += [
        f"{group.subject}/{group.name}: {handling.value} was cancelled and is handled"
        for handling in history.handlings
        if int(handling.value) in ledger.cancelled
    ]
    texts += [
        f"{group.subject}/{group.name}: {handling.value} of an uncommitted transaction is handled"
        for handling in history.handlings
        if ledger.revoked(int(handling.value))
    ]
    return texts + left_out + _lost(ledger, group)


def _counts(violation: Violation, strict: bool, loose: set[str]) -> bool:
    """Whether the violation counts: delayed messages are ordered by due time, loose keys not at all."""
    if violation.kind in ("send_order", "order") and str(violation.key).startswith(DELAYED):
        return False
    return strict or violation.kind not in OF_ORDER or violation.key not in loose


def _once(group: GroupPlan, history: History) -> list[str]:
    counts = Counter(int(handling.value) for handling in history.handlings)
    return [f"{group.subject}/{group.name}: {each} was delivered {n} times" for each, n in counts.items() if n > 1]


def _lost(ledger: Ledger, group: GroupPlan) -> list[str]:
    return [
        f"{group.subject}/{group.name} ({group.mode}, start {group.start}) lost {sorted(missing)[:20]}"
        f" of {holder[2] or 'the group'}"
        for holder, missing in ledger.missing(group).items()
        if missing
    ]
