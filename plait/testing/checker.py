"""``check`` finds where a ``History`` breaks Plait's promises. It returns a list of violations, each with its reason.

Kinds of violations (those about handling are found for each group separately):

- ``lost``: the send succeeded, but the group never handled the message with success, although it had time to.
- ``invented``: a message was handled that was never sent, not yet sent, not stored, or sent with another key.
- ``stored_twice``: a message was handled from two places, or from another place than its receipt names.
- ``send_order``: the places of a producer's messages contradict the order of its calls, or two messages have one place.
- ``order``: the handling of a message began before an earlier message of its key was handled with success.
- ``overlap``: two messages of a key were handled at the same time.
- ``epoch``: a consumer handled a message under a lower epoch than an earlier handling of the logical partition.
- ``owners``: two consumers handled messages of a logical partition under one epoch.
- ``duplicate``: a message was handled again, or by two consumers at once, and no fault excuses it.
- ``redelivered``: a message was handled again although its ack was confirmed, and no fault excuses it.

Message A was *sent earlier* than message B if one producer sent both and called A's send first, or if A's send ended
before B's send began. So concurrent sends of two producers have no order. A message whose send has an unknown outcome
is checked only if it was handled, and only against the messages of its own producer.

A fault *matches* two handlings of a message if it hit all consumers, one of their consumers, or the message's broker
group. A fault of one consumer at one broker group matches if the consumer and the group match. A matching fault excuses

- a duplicate, if it happened after the message was sent;
- a redelivery, if it happened after the send and before the ack was confirmed, or if it lets the broker forget acks;
- an overlap, if it hit the first consumer during its handling.

No fault excuses a violation of another kind.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from math import inf
from typing import Literal, NamedTuple

from plait.testing.history import Broken, Handling, History, Key, RecordedSend, Value

Kind = Literal[
    "lost", "invented", "stored_twice", "send_order", "order", "overlap", "epoch", "owners", "duplicate", "redelivered"
]


class Violation(NamedTuple):
    """One way in which a history breaks a promise."""

    kind: Kind
    text: str
    key: Key
    value: Value
    time: float

    def __str__(self) -> str:
        return f"{self.kind} at {self.time:.6f} s: {self.text}"


def check(
    history: History,
    strict: bool = True,
    *,
    ordered: bool = True,
    drained: bool = True,
    moves: bool = False,
    groups: Iterable[str] | None = None,
) -> list[Violation]:
    """The violations of a history; empty if it is correct.

    - ``strict=False``: do not check the order of keys with a failed send or a failed handling.
    - ``ordered=False``: do not check any order, as for shared consumers.
    - ``drained=False``: do not report unhandled messages as lost, because they may still be delivered.
    - ``moves``: the route changed, so a producer's messages may have overtaken its messages of other keys.
    - ``groups``: the groups that must have handled every message; None: all groups that handled a message.
    """
    sends: dict[Value, RecordedSend] = {}
    for send in history.sends:
        if sends.setdefault(send.value, send) is not send:
            raise ValueError(f"{send.value!r} was sent twice in this history: give every message a value of its own")
    excuses = _Excuses(history.faults)
    by_group: dict[str, list[Handling]] = {group: [] for group in groups or ()}
    # Sort by begin, because two threads may have recorded their handlings in the opposite order.
    for handling in sorted(history.handlings, key=lambda handling: handling.begun):
        by_group.setdefault(handling.group, []).append(handling)
    found = list(_send_order(history.sends, moves=moves))
    for group, handlings in (by_group or {"": []}).items():
        dead = {value for name, value in history.dead if name == group}
        first_done = _first_done(handlings)
        found += _invented(sends, handlings)
        found += _stored_twice(sends, handlings)
        found += _repeated(sends, handlings, excuses)
        if drained:
            found += _lost(history.sends, first_done, dead, group)
        if ordered:
            found += _order(_in_order(history.sends, handlings, first_done, dead, strict=strict), handlings, first_done)
            found += _overlap(handlings, excuses)
            found += _epochs(handlings)
    return found


class _Excuses:
    """Looks up faults by time and victim."""

    def __init__(self, faults: Iterable[Broken]) -> None:
        self._by_victim = _by_victim(faults)
        self._forgetting = _by_victim(fault for fault in faults if fault.forgets)

    def hit(self, victims: Iterable[_Victim], since: float, until: float) -> bool:
        """Whether a fault of one of these victims overlaps [since, until]."""
        return any(_reaches(self._by_victim.get(victim), since, until) for victim in victims)

    def forgot(self, victims: Iterable[_Victim], since: float, until: float) -> bool:
        return any(_reaches(self._forgetting.get(victim), since, until) for victim in victims)


#: (consumer, broker group). A consumer of None means all consumers, a broker group of "" means all broker groups.
_Victim = tuple[str | None, str]
_Faults = tuple[list[float], list[float]]


def _victims(*handlings: Handling) -> set[_Victim]:
    """The victims whose faults can explain the outcomes of these handlings."""
    groups = {"", *(handling.place[0].rpartition("@")[2] for handling in handlings if handling.place)}
    return {(consumer, group) for consumer in (None, *(each.consumer for each in handlings)) for group in groups}


def _by_victim(faults: Iterable[Broken]) -> dict[_Victim, _Faults]:
    """For each victim: the begins of its faults, in order, and for each fault the latest end of the faults up to it."""
    sorted_faults: dict[_Victim, list[Broken]] = defaultdict(list)
    for fault in sorted(faults, key=lambda fault: fault.time):
        sorted_faults[fault.consumer, fault.at].append(fault)
    return {
        victim: ([fault.time for fault in some], list(accumulate((fault.until for fault in some), max)))
        for victim, some in sorted_faults.items()
    }


def _reaches(faults: _Faults | None, since: float, until: float) -> bool:
    if faults is None:
        return False
    begun = bisect_right(faults[0], until)
    return begun > 0 and faults[1][begun - 1] >= since


# --- single messages ------ ---------------------------------------------------------------------


def _first_done(handlings: Iterable[Handling]) -> dict[Value, float]:
    """The time at which each message was first handled with success."""
    first: dict[Value, float] = {}
    for handling in handlings:
        if handling.outcome == "ok" and handling.ended is not None:
            before = first.get(handling.value)
            if before is None or handling.ended < before:
                first[handling.value] = handling.ended
    return first


def _lost(
    sends: Iterable[RecordedSend], first_done: dict[Value, float], dead: set[Value], group: str
) -> Iterator[Violation]:
    for send in sends:
        if send.outcome == "ok" and send.value not in first_done and send.value not in dead:
            who = f" by {group}" if group else ""
            yield _violation(
                "lost", send, f"sent{f' by {send.producer}' if send.producer else ''} and never handled{who}"
            )


def _invented(sends: dict[Value, RecordedSend], handlings: Iterable[Handling]) -> Iterator[Violation]:
    for handling in handlings:
        send = sends.get(handling.value)
        if send is None:
            yield _violation("invented", handling, "was never sent")
        elif send.key != handling.key:
            yield _violation("invented", handling, f"was sent with key {send.key!r}")
        elif send.outcome == "failed":
            yield _violation("invented", handling, f"its send has failed: {send.error}")
        elif handling.begun < send.begun:
            yield _violation("invented", handling, f"was sent only at {send.begun:.6f} s")


def _stored_twice(sends: dict[Value, RecordedSend], handlings: Iterable[Handling]) -> Iterator[Violation]:
    places = {value: send.place for value, send in sends.items() if send.place is not None}
    for handling in handlings:
        if handling.place is not None:
            known = places.setdefault(handling.value, handling.place)
            if known != handling.place:
                yield _violation("stored_twice", handling, f"from {handling.place}, but it is known at {known}")


def _send_order(sends: Iterable[RecordedSend], *, moves: bool) -> Iterator[Violation]:
    last: dict[tuple[str, str, Key], RecordedSend] = {}
    taken: dict[tuple[str, int], RecordedSend] = {}
    for send in sends:
        if send.outcome != "ok" or send.place is None:
            continue
        other = taken.setdefault(send.place, send)
        if other is not send:
            yield _violation("send_order", send, f"{other.value!r} is at {send.place} as well")
            continue
        partition, sequence = send.place
        if moves and send.key is None:
            continue
        place = (send.producer, partition, send.key if moves else None)
        before = last.get(place)
        if before is not None and before.place is not None and before.place[1] > sequence:
            text = f"at {send.place}, but {before.value!r}, sent before it, at {before.place}"
            yield _violation("send_order", send, text)
        else:
            last[place] = send


def _repeated(
    sends: dict[Value, RecordedSend], handlings: Iterable[Handling], excuses: _Excuses
) -> Iterator[Violation]:
    earlier: dict[Value, list[Handling]] = {}
    for handling in handlings:
        before = earlier.setdefault(handling.value, [])
        for first in before:
            violation = _again(sends.get(handling.value), first, handling, excuses)
            if violation is not None:
                yield violation
                break
        before.append(handling)


def _again(send: RecordedSend | None, first: Handling, second: Handling, excuses: _Excuses) -> Violation | None:
    """The violation that a second handling of a message is; None: it is correct or excused."""
    over = first.ended is None or first.ended <= second.begun
    if first.outcome != "ok" and over:
        # The first handling failed or has an unknown outcome, so the message must be delivered again.
        return None
    since = first.begun if send is None else send.begun
    victims = _victims(first, second)
    if first.ack == "ok" and first.acked is not None and first.acked < second.begun:
        if excuses.forgot(victims, since, second.begun) or excuses.hit(victims, since, first.acked):
            return None
        text = f"handled by {second.consumer} although {first.consumer}'s ack was confirmed at {first.acked:.6f} s"
        return _violation("redelivered", second, text)
    if first.ack == "failed" or excuses.hit(victims, since, second.begun):
        return None
    how = "after" if over else "while"
    text = f"handled by {second.consumer} {how} {first.consumer} did, from {first.begun:.6f} s on, without a fault"
    return _violation("duplicate", second, text)


# --- the messages of a key ----------------------------------------------------------------------


class _InOrder:
    """The messages of one key in the (partial) order of sending."""

    def __init__(self) -> None:
        #: The messages of each producer, in the order of its calls.
        self.by_producer: dict[str, list[RecordedSend]] = defaultdict(list)
        #: The messages whose send has a known end.
        self.ended: list[RecordedSend] = []


def _in_order(
    sends: Iterable[RecordedSend],
    handlings: Iterable[Handling],
    first_done: dict[Value, float],
    dead: set[Value],
    *,
    strict: bool,
) -> dict[Key, _InOrder]:
    """The messages for which order is required, by key."""
    exempt: set[Key] = {None}
    begun = {handling.value for handling in handlings}
    if not strict:
        exempt.update(send.key for send in sends if send.outcome != "ok")
        exempt.update(handling.key for handling in handlings if handling.outcome != "ok")
    keys: dict[Key, _InOrder] = defaultdict(_InOrder)
    for send in sends:
        if send.key in exempt or send.value in dead or send.outcome == "failed":
            continue
        if send.outcome == "unknown" and send.value not in begun and send.value not in first_done:
            continue
        keys[send.key].by_producer[send.producer].append(send)
        if send.outcome == "ok" and send.ended is not None:
            keys[send.key].ended.append(send)
    return keys


def _order(
    keys: dict[Key, _InOrder], handlings: Iterable[Handling], first_done: dict[Value, float]
) -> Iterator[Violation]:
    """Find handlings that began before every message that was sent earlier was handled with success."""
    # Message → (time, send): of the messages that were sent earlier, the one that was done last, and when.
    ready: dict[Value, tuple[float, RecordedSend]] = {}
    for key in keys.values():
        for sends in key.by_producer.values():
            _after_own(sends, first_done, ready)
        if len(key.by_producer) > 1:
            _after_others(key, first_done, ready)
    for handling in handlings:
        after = ready.get(handling.value)
        if after is not None and handling.begun < after[0]:
            done, send = after
            state = "is not handled yet" if done == inf else f"was done only at {done:.6f} s"
            yield _violation("order", handling, f"{handling.consumer} began with it, but {send.value!r} {state}")


def _after_own(
    sends: list[RecordedSend], first_done: dict[Value, float], ready: dict[Value, tuple[float, RecordedSend]]
) -> None:
    latest, which = -inf, sends[0]
    for send in sends:
        if latest > -inf:
            ready[send.value] = (latest, which)
        done = first_done.get(send.value, inf)
        if done > latest:
            latest, which = done, send


def _after_others(
    key: _InOrder, first_done: dict[Value, float], ready: dict[Value, tuple[float, RecordedSend]]
) -> None:
    by_end = sorted(key.ended, key=_end)
    ends = [_end(send) for send in by_end]
    latest = list(accumulate(((first_done.get(send.value, inf), send) for send in by_end), _later))
    for sends in key.by_producer.values():
        for send in sends:
            before = bisect_left(ends, send.begun)
            if before:
                known = ready.get(send.value)
                ready[send.value] = latest[before - 1] if known is None else _later(known, latest[before - 1])


def _end(send: RecordedSend) -> float:
    assert send.ended is not None
    return send.ended


def _later(one: tuple[float, RecordedSend], other: tuple[float, RecordedSend]) -> tuple[float, RecordedSend]:
    return other if other[0] > one[0] else one


def _overlap(handlings: Iterable[Handling], excuses: _Excuses) -> Iterator[Violation]:
    active: dict[Key, list[Handling]] = {}
    for handling in handlings:
        if handling.key is None:
            continue
        others = [other for other in active.get(handling.key, ()) if (other.ended or 0.0) > handling.begun]
        for other in others:
            if not excuses.hit([(other.consumer, "")], other.begun, handling.begun):
                until = f"until {other.ended:.6f} s" if other.ended is not None else ""
                text = f"{handling.consumer} began while {other.consumer} had {other.value!r} of that key {until}"
                yield _violation("overlap", handling, text)
                break
        others.append(handling)
        active[handling.key] = others


def _epochs(handlings: Iterable[Handling]) -> Iterator[Violation]:
    highest: dict[int | str | None, Handling] = {}
    owners: dict[tuple[int | str | None, int], str] = {}
    for handling in handlings:
        if handling.epoch is None or (handling.lp is None and handling.key is None):
            continue
        # Without a known LP the key takes its place; as text, so that it differs from any LP.
        slot = handling.lp if handling.lp is not None else f"key {handling.key}"
        before = highest.get(slot)
        if before is not None and before.epoch is not None and handling.epoch < before.epoch:
            text = f"epoch {handling.epoch} of {handling.consumer} after {before.epoch} of {before.consumer} ({slot})"
            yield _violation("epoch", handling, text)
        else:
            highest[slot] = handling
        owner = owners.setdefault((slot, handling.epoch), handling.consumer)
        if owner != handling.consumer:
            text = f"{handling.consumer} and {owner} both handled under epoch {handling.epoch} ({slot})"
            yield _violation("owners", handling, text)


def _violation(kind: Kind, about: RecordedSend | Handling, text: str) -> Violation:
    return Violation(kind, f"{about.value!r} of key {about.key!r}: {text}", about.key, about.value, about.begun)
