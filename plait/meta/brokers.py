"""Brokers: registration, liveness, and the state of broker groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, get_args

import msgspec

from plait.errors import DiskFull, InvalidArgument, NoBroker
from plait.meta.core import Core, decided
from plait.meta.database.connection import ConcurrentChange
from plait.meta.database.schema import BrokerRow
from plait.meta.members.liveness import Liveness
from plait.model import names
from plait.wire.admin.cluster import BrokerInfo, State

_STATES = get_args(State)
#: Longest reason of a broker, in characters.
REASON_MAX = 200
#: Brokers named in one error message.
CAUSES_MAX = 8


class Brokers:
    """The brokers of the cluster."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._watch = Liveness(core, "b", core.limits.broker_lost_seconds)

    # --- requests of brokers --------------------------------------------------------------------

    def register(self, group: str, broker: str, address: str, state: State, epoch: int, reason: str = "") -> None:
        """Register a broker. A second broker of the same group is refused while the first is alive."""
        names.check("broker group", group)
        names.check("broker", broker)
        _check_state(state)
        self._register(group, broker, address, state, epoch, _checked_reason(reason))
        self._watch.notice(f"{group}/{broker}")

    @decided
    def _register(self, group: str, broker: str, address: str, state: State, epoch: int, reason: str) -> None:
        known = self._core.mirror.brokers.get(group, {})
        others = [row for name, row in known.items() if name != broker]
        for other in others:
            # A broker that stopped cleanly has reported "NRW".
            if self._lives(other) and other.reported != "NRW":
                raise InvalidArgument(
                    f"broker group {group!r} already has broker {other.broker!r} at {other.address}; "
                    "use another group name"
                )
        before = known.get(broker)
        moved = before is not None and before.address != address and epoch <= before.epoch
        if before is not None and moved and self._lives(before) and before.reported != "NRW":
            # A crashed broker returns with a higher epoch, and one that stopped cleanly has reported "NRW".
            raise InvalidArgument(
                f"broker {broker!r} of group {group!r} is alive at {before.address}; "
                f"stop it before it starts at {address}"
            )
        wished = before.wished if before is not None else others[0].wished if others else "RW"
        if before is not None and before.reported == state and bool(before.reason) == bool(reason):
            # The figures in a reason change all the time; keep the first one until the state changes.
            reason = before.reason
        row = BrokerRow(group, broker, address, wished, state, epoch, reason)
        if before is not None and msgspec.structs.replace(before, changed=0) == row:
            return
        with self._core.change() as change:
            if before is None and not self._core.mirror.follows(change):
                raise ConcurrentChange("another meta server made a change, perhaps of this broker group")
            if others:
                change.remove(*others)
            if before is None:
                change.insert(row)
            else:
                change.replace((before, row))
        self._watch.forget([_watch_name(other) for other in others])

    def heartbeat(self, group: str, broker: str, state: State, reason: str = "") -> int:
        """Record a heartbeat with the broker's state. Returns the newest change; 0 if the broker must register first.

        ``reason`` says why the broker accepts no messages. It is written when the state changes, not when only its
        figures do.
        """
        _check_state(state)
        if self._core.down is not None:
            raise self._core.down
        row = self._core.mirror.brokers.get(group, {}).get(broker)
        if row is None:
            return 0
        if row.reported != state or bool(row.reason) != bool(reason):
            self._core.decide(lambda: self._set(group, broker, reported=state, reason=_checked_reason(reason)))
        self._watch.notice(f"{group}/{broker}")
        return max(self._core.mirror.seen, 1)

    def knows(self, group: str, broker: str) -> bool:
        return broker in self._core.mirror.brokers.get(group, {})

    def is_there(self, group: str) -> bool:
        """True unless every broker of the group is lost or has stopped cleanly."""
        return any(self._lives(row) and row.reported != "NRW" for row in self._core.mirror.brokers[group].values())

    def forgotten(self, group: str) -> None:
        self._watch.forget([name for name in self._watch if name.startswith(f"{group}/")])

    @decided
    def wish(self, group: str, state: State) -> None:
        """Set the state that the operator wants for a broker group."""
        _check_state(state)
        self._core.mirror.check_group(group)
        for broker in list(self._core.mirror.brokers[group]):
            self._set(group, broker, wished=state)

    def _set(self, group: str, broker: str, **fields: str) -> None:
        row = self._core.mirror.brokers.get(group, {}).get(broker)
        if row is not None and any(getattr(row, field) != value for field, value in fields.items()):
            with self._core.change() as change:
                change.replace((row, msgspec.structs.replace(row, **fields)))

    # --- state ----------------------------------------------------------------------------------

    def watch(self, seconds: float) -> None:
        """Called every tick: exchange heartbeat counts with other meta servers and count silence."""
        for rows in self._core.mirror.brokers.values():
            for row in rows.values():
                self._watch.expect(_watch_name(row))
        if not self._core.store.alone:
            while self._watch.exchange():
                pass
        self._watch.advance(seconds)

    def views(self) -> list[BrokerInfo]:
        """All brokers, as this meta server knows them."""
        self._core.refresh()
        load = self._core.mirror.load
        return [
            BrokerInfo(
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
        """The addresses of the group's live brokers, or of all its brokers if none is alive."""
        rows = [row for _, row in sorted(self._core.mirror.brokers.get(group, {}).items())]
        return [row.address for row in rows if self._lives(row)] or [row.address for row in rows]

    def state(self, group: str) -> State:
        """The state of a broker group: what any of its brokers allows."""
        allowed = "".join(self._state_of(row) for row in self._core.mirror.brokers.get(group, {}).values())
        return _state("".join(letter for letter in "RW" if letter in allowed.replace("NRW", "")))

    def available(self, groups: Sequence[str] | None = None) -> list[str]:
        """Broker groups for new partitions, those with the fewest partitions first; among ``groups`` if given.

        Only groups with a confirmed heartbeat: a subject's partitions stay where they are created.
        """
        known = self._core.mirror.brokers
        for group in groups or ():
            self._core.mirror.check_group(group)
        fit = [
            group
            for group, rows in known.items()
            if (groups is None or group in groups)
            and self.state(group) == "RW"
            and any(self._watch.is_certain(_watch_name(row)) for row in rows.values())
        ]
        return sorted(fit, key=lambda group: (self._core.mirror.load.get(group, 0), group))

    def refuse(self, what: str, groups: Sequence[str] | None = None) -> NoReturn:
        """Raise the error for groups none of which is ``available``, naming each and its cause.

        Raises ``DiskFull`` if all of them are full, because waiting for a broker would not help; else ``NoBroker``.
        """
        known = self._core.mirror.brokers
        rows = [row for group in sorted(groups or known) for _, row in sorted(known.get(group, {}).items())]
        causes = {f"{row.broker_group}: {self._cause(row)}" for row in rows}
        kind = DiskFull if rows and all(self._lives(row) and row.reason for row in rows) else NoBroker
        listed = "; ".join(sorted(causes)[:CAUSES_MAX]) or "no broker has registered yet"
        more = f"; and {len(causes) - CAUSES_MAX} more" if len(causes) > CAUSES_MAX else ""
        raise kind(f"no broker group is available for {what}: {listed}{more}", brokers=sorted(causes)[:CAUSES_MAX])

    def _cause(self, row: BrokerRow) -> str:
        if not self._lives(row):
            return f"the broker at {row.address} is lost (no heartbeat)"
        if row.reason:
            return row.reason
        if row.wished != "RW":
            return f"an operator set it to {row.wished}; run 'plait cluster state {row.broker_group} RW'"
        if row.reported != "RW":
            return f"the broker at {row.address} has stopped or accepts no messages ({row.reported})"
        return f"no heartbeat from the broker at {row.address} yet"

    def settled(self) -> bool:
        """True once every broker has a confirmed heartbeat or is lost. False in the first seconds of a meta server."""
        self._core.refresh()
        rows = [row for rows in self._core.mirror.brokers.values() for row in rows.values()]
        return all(self._watch.is_certain(_watch_name(row)) or not self._lives(row) for row in rows)

    def _lives(self, row: BrokerRow) -> bool:
        name = _watch_name(row)
        return name not in self._watch or self._watch.lives(name)

    def _state_of(self, row: BrokerRow) -> State:
        if not self._lives(row):
            return "NRW"
        both = set(row.wished.replace("NRW", "")) & set(row.reported.replace("NRW", ""))
        return _state("".join(letter for letter in "RW" if letter in both))


def _watch_name(row: BrokerRow) -> str:
    return f"{row.broker_group}/{row.broker}"


def _checked_reason(reason: str) -> str:
    return "".join(letter for letter in reason if letter.isprintable())[:REASON_MAX]


def _state(letters: str) -> State:
    return letters if letters in _STATES else "NRW"  # type: ignore[return-value]


def _check_state(state: object) -> None:
    if state not in _STATES:
        raise InvalidArgument(f"broker state {state!r} is invalid; use one of {', '.join(_STATES)}")
