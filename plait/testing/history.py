"""``History``: what happened to messages, as their senders and handlers saw it; ``plait.testing.checker`` judges it.

Everything has an outcome of three values. *ok* and *failed* are certain; *unknown* is what a time-out, a lost
connection or a killed process leaves behind, and what stays open is unknown too. Times are seconds on one clock that
all recorders share: a simulation's virtual time, or one machine's monotonic clock.

A history can be recorded from several threads, and from several processes: each writes its own file, line by line as
things happen, so that what was recorded survives the process; ``History.read`` joins them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

Outcome = Literal["ok", "failed", "unknown"]
#: What is sent, and its order key; a value is sent once in a history.
Value = str | int
Key = str | int | None
#: A partition's name and a sequence in it.
Place = tuple[str, int]


class RecordedSend:
    """A message on its way in."""

    __slots__ = ("_history", "begun", "ended", "error", "key", "number", "outcome", "place", "producer", "value")

    def __init__(self, history: History, number: int, producer: str, key: Key, value: Value, begun: float) -> None:
        self._history = history
        #: Counts the sends of the history: those of one producer have the order in which it called.
        self.number = number
        self.producer = producer
        self.key = key
        self.value = value
        self.begun = begun
        self.outcome: Outcome = "unknown"
        self.ended: float | None = None
        self.place: Place | None = None
        self.error = ""

    def ok(self, place: Place | None = None, time: float | None = None) -> None:
        """It is stored."""
        self._end("ok", time, place=place)

    def failed(self, error: object = "", time: float | None = None) -> None:
        """It is certainly not stored, and never will be."""
        self._end("failed", time, error=str(error))

    def unknown(self, error: object = "", time: float | None = None) -> None:
        """It may be stored, now or later."""
        self._end("unknown", time, error=str(error))

    def _end(self, outcome: Outcome, time: float | None, place: Place | None = None, error: str = "") -> None:
        self._history._write("sent", [self.number, outcome, time, place, error])
        self.outcome, self.ended, self.place, self.error = outcome, time, place, error


class Handling:
    """A message in somebody's hands."""

    __slots__ = (
        "_history", "ack", "acked", "attempt", "begun", "consumer", "ended", "epoch", "group", "key", "lp", "number",
        "outcome", "place", "value",
    )  # fmt: skip

    def __init__(
        self,
        history: History,
        number: int,
        consumer: str,
        key: Key,
        value: Value,
        attempt: int,
        epoch: int | None,
        lp: int | None,
        place: Place | None,
        begun: float,
        group: str,
    ) -> None:
        self._history = history
        #: Counts the handlings of the history, in the order they began.
        self.number = number
        self.consumer = consumer
        self.key = key
        self.value = value
        self.attempt = attempt
        self.epoch = epoch
        self.lp = lp
        self.place = place
        self.begun = begun
        self.group = group
        self.outcome: Outcome = "unknown"
        self.ended: float | None = None
        #: What became of its ack; None: nothing is known of one.
        self.ack: Outcome | None = None
        self.acked: float | None = None

    def done(self, time: float) -> None:
        """The handler has done its work."""
        self._end("ok", time)

    def failed(self, time: float) -> None:
        """The handler has failed; the message is to come again."""
        self._end("failed", time)

    def unknown(self, time: float) -> None:
        """The handler was torn out of its work."""
        self._end("unknown", time)

    def _end(self, outcome: Outcome, time: float) -> None:
        self._history._write("handled", [self.number, outcome, time])
        self.outcome, self.ended = outcome, time

    def ack_ok(self, time: float) -> None:
        """The broker has confirmed the ack."""
        self._acked("ok", time)

    def ack_failed(self, time: float) -> None:
        """The broker has refused the ack."""
        self._acked("failed", time)

    def ack_unknown(self, time: float) -> None:
        """The ack may have come through."""
        self._acked("unknown", time)

    def _acked(self, outcome: Outcome, time: float) -> None:
        self._history._write("acked", [self.number, outcome, time])
        self.ack, self.acked = outcome, time


class Broken:
    """A fault, and what it excuses."""

    __slots__ = ("at", "consumer", "forgets", "reason", "time", "until")

    def __init__(
        self, reason: str, time: float, until: float | None, consumer: str | None, forgets: bool, at: str = ""
    ) -> None:
        self.reason = reason
        self.time = time
        #: When it was over.
        self.until = time if until is None else until
        #: Whom it hit; None: everybody.
        self.consumer = consumer
        #: The broker group whose messages it hit; "": those of all.
        self.at = at
        #: What was confirmed may be forgotten: power was lost where not everything is flushed.
        self.forgets = forgets


class History:
    """See the module. ``path``: where each event is written as it happens, for a process that may be killed."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.sends: list[RecordedSend] = []
        self.handlings: list[Handling] = []
        self.faults: list[Broken] = []
        #: (group, value) of messages that were given up in order: dead letters.
        self.dead: set[tuple[str, Value]] = set()
        self._open: dict[str, dict[Handling, None]] = {}
        self._lock = threading.RLock()
        # A file of its own for every life of a process: numbers count from 0 in each.
        self._file: TextIO | None = None if path is None else open(path, "x", encoding="utf-8")  # noqa: SIM115

    # --- recording ------------------------------------------------------------------------------

    def send(self, key: Key, value: Value, time: float, *, producer: str = "") -> RecordedSend:
        """A message is about to be sent."""
        with self._lock:
            send = RecordedSend(self, len(self.sends), producer, key, value, time)
            self.sends.append(send)
            self._write("send", [send.number, producer, key, value, time])
        return send

    def handle(
        self,
        consumer: str,
        key: Key,
        value: Value,
        attempt: int = 1,
        epoch: int | None = None,
        lp: int | None = None,
        place: Place | None = None,
        time: float = 0.0,
        *,
        group: str = "",
    ) -> Handling:
        """A handler begins with a message."""
        with self._lock:
            handling = Handling(self, len(self.handlings), consumer, key, value, attempt, epoch, lp, place, time, group)
            self.handlings.append(handling)
            self._open.setdefault(consumer, {})[handling] = None
            self._write("handle", [handling.number, consumer, key, value, attempt, epoch, lp, place, time, group])
        return handling

    def gone(self, consumer: str, time: float) -> None:
        """A consumer is dead: what it was handling ended there, nobody knows how."""
        for handling in self._open.pop(consumer, {}):
            if handling.ended is None:
                handling.unknown(time)

    def bury(self, value: Value, *, group: str = "") -> None:
        """A message was given up in order: it is a dead letter of the group."""
        self.dead.add((group, value))
        self._write("dead", [group, value])

    def broken(
        self,
        reason: str,
        time: float,
        *,
        until: float | None = None,
        consumer: str | None = None,
        forgets: bool = False,
        at: str = "",
    ) -> None:
        """A fault happened. ``consumer``: it hit only that one, and excuses only what became of its messages.

        ``at``: it hit only that broker group, and excuses only what became of messages whose place is there. Both: it
        hit only that one's dealings with that broker group.
        """
        self.faults.append(Broken(reason, time, until, consumer, forgets, at))
        self._write("broken", [reason, time, until, consumer, forgets, at])

    # --- files ----------------------------------------------------------------------------------

    def _write(self, event: str, fields: list[Any]) -> None:
        if self._file is not None:
            with self._lock:
                self._file.write(json.dumps([event, *fields]) + "\n")
                # With the machine, if not on its disk: a process that is killed next leaves it behind.
                self._file.flush()

    def close(self) -> None:
        """Write nothing more."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @classmethod
    def read(cls, paths: Iterable[str | Path]) -> History:
        """The history that several processes recorded, each in a file of its own."""
        whole = cls()
        sends: list[RecordedSend] = []
        handlings: list[Handling] = []
        for path in paths:
            part = cls()
            for event, *fields in _lines(path):
                part._replay(event, fields)
            sends += part.sends
            handlings += part.handlings
            whole.faults += part.faults
            whole.dead |= part.dead
        # Stable: what one process recorded at one time keeps its order.
        whole.sends = sorted(sends, key=lambda send: send.begun)
        whole.handlings = sorted(handlings, key=lambda handling: handling.begun)
        for number, send in enumerate(whole.sends):
            send.number = number
            send._history = whole
        for number, handling in enumerate(whole.handlings):
            handling.number = number
            handling._history = whole
            if handling.ended is None:
                whole._open.setdefault(handling.consumer, {})[handling] = None
        return whole

    def _replay(self, event: str, fields: list[Any]) -> None:
        match event, fields:
            case "send", [_, producer, key, value, time]:
                self.send(key, value, time, producer=producer)
            case "sent", [number, outcome, time, place, error]:
                self.sends[number]._end(outcome, time, _place(place), error)
            case "handle", [_, consumer, key, value, attempt, epoch, lp, place, time, group]:
                self.handle(consumer, key, value, attempt, epoch, lp, _place(place), time, group=group)
            case "handled", [number, outcome, time]:
                self.handlings[number]._end(outcome, time)
            case "acked", [number, outcome, time]:
                self.handlings[number]._acked(outcome, time)
            case "dead", [group, value]:
                self.bury(value, group=group)
            case "broken", [reason, time, until, consumer, forgets, at]:
                self.broken(reason, time, until=until, consumer=consumer, forgets=forgets, at=at)
            case _:
                raise ValueError(f"not an event of a history: {event} {fields}")


def _lines(path: str | Path) -> Iterator[list[Any]]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            # The last one of a process that was killed while it wrote.
            if line.endswith("\n"):
                yield json.loads(line)


def _place(fields: list[Any] | None) -> Place | None:
    return None if fields is None else (fields[0], fields[1])
