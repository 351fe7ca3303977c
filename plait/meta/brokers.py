"""Brokers: who they are, whether they live, and what can be asked of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, get_args

import msgspec

from plait.errors import DiskFull, InvalidArgument, NoBroker
from plait.meta.core import Core
from plait.meta.database.connection import ConcurrentChange
from plait.meta.database.schema import BrokerRow
from plait.meta.members.liveness import Liveness
from plait.meta.views import BrokerView, State
from plait.model import names

_STATES = get_args(State)
#: Characters of the reason that a broker gives for its state.
REASON_MAX = 200
#: Brokers that one refusal names.
CAUSES_MAX = 8
#: Names of brokers among those whose heartbeats are counted; a / is in no name.
_PREFIX = "b/"
_PREFIX_END = "b0"


class Brokers:
    """The brokers of the cluster."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._watch = Liveness(core.limits.broker_lost_seconds)
        #: Heard of since their counters were written.
        self._heard: set[str] = set()
        self._states: dict[str, State] = {}

    # --- what brokers say -----------------------------------------------------------------------

    def register(self, group: str, broker: str, address: str, state: State, epoch: int, reason: str = "") -> None:
        """The broker is there. Another one of the same group is refused while the first lives."""
        names.check("broker group", group)
        names.check("broker", broker)
        _check_state(state)
        self._core.decide(lambda: self._register(group, broker, address, state, epoch, _checked_reason(reason)))
        self._hear(group, broker)

    def _register(self, group: str, broker: str, address: str, state: State, epoch: int, reason: str) -> None:
        known = self._core.mirror.brokers.get(group, {})
        others = [row for name, row in known.items() if name != broker]
        for other in others:
            # One that stopped in order has said so.
            if self._lives(other) and other.reported != "NRW":
                raise InvalidArgument(
                    f"broker group {group!r} has a broker, {other.broker!r} at {other.address}; use another group name"
                )
        before = known.get(broker)
        moved = before is not None and before.address != address and epoch <= before.epoch
        if before is not None and moved and self._lives(before) and before.reported != "NRW":
            # One that crashed comes back with a higher epoch, and one that stopped in order has said so.
            raise InvalidArgument(
                f"broker {broker!r} of group {group!r} is at {before.address} and lives; it is not at {address} as well"
            )
        wished = before.wished if before is not None else others[0].wished if others else "RW"
        if before is not None and before.reported == state and bool(before.reason) == bool(reason):
            # Figures in it change all the time; the first report stands until the state changes.
            reason = before.reason
        row = BrokerRow(group, broker, address, wished, state, epoch, reason)
        if before is not None and msgspec.structs.replace(before, changed=0) == row:
            return
        with self._core.change() as change:
            if before is None and not self._core.mirror.follows(change):
                raise ConcurrentChange("others changed something, perhaps this very group")
            if others:
                change.remove(*others)
            if before is None:
                change.insert(row)
            else:
                change.replace((before, row))
        for other in others:
            self._watch.forget(_who(other))

    def beat(self, group: str, broker: str, state: State, reason: str = "") -> bool:
        """The broker lives and is in that state; False: it is not known and has to register.

        ``reason`` says why it takes no messages. It is written when the state changes, not whenever its figures do.
        """
        _check_state(state)
        if self._core.down is not None:
            raise self._core.down
        row = self._core.mirror.brokers.get(group, {}).get(broker)
        if row is None:
            return False
        if row.reported != state or bool(row.reason) != bool(reason):
            self._core.decide(lambda: self._set(group, broker, reported=state, reason=_checked_reason(reason)))
        self._hear(group, broker)
        return True

    def knows(self, group: str, broker: str) -> bool:
        """The broker has registered."""
        return broker in self._core.mirror.brokers.get(group, {})

    def is_there(self, group: str) -> bool:
        """A broker of the group is heard of, or may be: it has not been silent for long enough."""
        return any(self._lives(row) and row.reported != "NRW" for row in self._core.mirror.brokers[group].values())

    def forgotten(self, group: str) -> None:
        """The broker group was given up."""
        for who in [who for who in self._watch if who.startswith(f"{_PREFIX}{group}/")]:
            self._watch.forget(who)

    def wish(self, group: str, state: State) -> None:
        """What the operator wants of a broker group."""
        _check_state(state)

        def decision() -> None:
            if group not in self._core.mirror.brokers:
                raise InvalidArgument(f"there is no broker group {group!r}")
            for broker in list(self._core.mirror.brokers[group]):
                self._set(group, broker, wished=state)

        self._core.decide(decision)

    def _set(self, group: str, broker: str, **fields: str) -> None:
        row = self._core.mirror.brokers.get(group, {}).get(broker)
        if row is not None and any(getattr(row, field) != value for field, value in fields.items()):
            with self._core.change() as change:
                change.replace((row, msgspec.structs.replace(row, **fields)))

    def _hear(self, group: str, broker: str) -> None:
        who = f"{_PREFIX}{group}/{broker}"
        self._watch.hear(who)
        self._heard.add(who)

    # --- what is seen of them -------------------------------------------------------------------

    def watch(self, seconds: float) -> None:
        """Time has passed: who was heard of, here or by other meta servers?"""
        core = self._core
        if not core.store.alone:
            with core.noted():
                core.store.beat(list(self._heard))
                after, page = _PREFIX, core.limits.page
                while after:
                    found = core.store.beats(after, _PREFIX_END, page)
                    for who, count in found:
                        self._watch.see(who, count)
                    after = found[-1][0] if len(found) == page else ""
        self._heard.clear()
        for rows in core.mirror.brokers.values():
            for row in rows.values():
                self._watch.expect(_who(row))
        self._watch.advance(seconds)
        self._compare()

    def _compare(self) -> None:
        """Note which broker groups are in another state than before."""
        states = {group: self.state(group) for group in self._core.mirror.brokers}
        self._core.mirror.new_brokers.update(
            group for group in states.keys() | self._states.keys() if states.get(group) != self._states.get(group)
        )
        self._states = states

    def views(self) -> list[BrokerView]:
        load = self._core.mirror.load
        return [
            BrokerView(
                row.broker_group,
                row.broker,
                row.address,
                _state(row.wished),
                self._state_of(row),
                row.epoch,
                load.get(row.broker_group, 0),
                row.reason,
            )
            for _, rows in sorted(self._core.mirror.brokers.items())
            for _, row in sorted(rows.items())
        ]

    def addresses(self, group: str) -> list[str]:
        """Where the group can be reached: those that live, or all if none seems to."""
        rows = [row for _, row in sorted(self._core.mirror.brokers.get(group, {}).items())]
        return [row.address for row in rows if self._lives(row)] or [row.address for row in rows]

    def state(self, group: str) -> State:
        """What can be asked of the group: all that any of its brokers allows."""
        allowed = "".join(self._state_of(row) for row in self._core.mirror.brokers.get(group, {}).values())
        return _state("".join(letter for letter in "RW" if letter in allowed.replace("NRW", "")))

    def available(self, groups: Sequence[str] | None = None) -> list[str]:
        """Groups that new partitions can go to, those with the fewest first; of these, if some are named.

        Only such as have been heard of for certain: a subject's partitions stay where they are for good.
        """
        known = self._core.mirror.brokers
        for group in groups or ():
            if group not in known:
                raise InvalidArgument(f"there is no broker group {group!r}")
        fit = [
            group
            for group, rows in known.items()
            if (groups is None or group in groups)
            and self.state(group) == "RW"
            and any(self._watch.is_certain(_who(row)) for row in rows.values())
        ]
        return sorted(fit, key=lambda group: (self._core.mirror.load.get(group, 0), group))

    def refuse(self, what: str, groups: Sequence[str] | None = None) -> NoReturn:
        """No group of these is ``available``: raise the error that names each and its cause.

        ``DiskFull`` where every one of them has no space; a caller that waits for a broker would wait in vain.
        """
        known = self._core.mirror.brokers
        rows = [row for group in sorted(groups or known) for _, row in sorted(known.get(group, {}).items())]
        causes = {f"{row.broker_group}: {self._cause(row)}" for row in rows}
        kind = DiskFull if rows and all(self._lives(row) and row.reason for row in rows) else NoBroker
        listed = "; ".join(sorted(causes)[:CAUSES_MAX]) or "no broker has registered yet"
        more = f"; and {len(causes) - CAUSES_MAX} more" if len(causes) > CAUSES_MAX else ""
        raise kind(f"no broker group is available for {what}: {listed}{more}", brokers=sorted(causes)[:CAUSES_MAX])

    def _cause(self, row: BrokerRow) -> str:
        """Why nothing new can go to a broker."""
        if not self._lives(row):
            return f"the broker at {row.address} is lost (no heartbeat)"
        if row.reason:
            return row.reason
        if row.wished != "RW":
            return f"an operator has set it to {row.wished} (plait cluster state {row.broker_group} RW)"
        if row.reported != "RW":
            return f"the broker at {row.address} has stopped or takes no messages ({row.reported})"
        return f"no heartbeat of the broker at {row.address} has come yet"

    def settled(self) -> bool:
        """Of each broker it is known whether it lives; not so in the first seconds of a meta server."""
        if self._core.down is not None:
            raise self._core.down
        rows = [row for rows in self._core.mirror.brokers.values() for row in rows.values()]
        return all(self._watch.is_certain(_who(row)) or not self._lives(row) for row in rows)

    def _lives(self, row: BrokerRow) -> bool:
        who = _who(row)
        return who not in self._watch or self._watch.lives(who)

    def _state_of(self, row: BrokerRow) -> State:
        if not self._lives(row):
            return "NRW"
        both = set(row.wished.replace("NRW", "")) & set(row.reported.replace("NRW", ""))
        return _state("".join(letter for letter in "RW" if letter in both))


def _who(row: BrokerRow) -> str:
    return f"{_PREFIX}{row.broker_group}/{row.broker}"


def _checked_reason(reason: str) -> str:
    return "".join(letter for letter in reason if letter.isprintable())[:REASON_MAX]


def _state(letters: str) -> State:
    return letters if letters in _STATES else "NRW"  # type: ignore[return-value]


def _check_state(state: object) -> None:
    if state not in _STATES:
        raise InvalidArgument(f"a broker's state is one of {', '.join(_STATES)}, not {state!r}")
