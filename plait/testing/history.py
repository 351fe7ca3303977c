"""``History`` records what senders and handlers see of messages. ``plait.testing.checker`` checks the record.

Every operation has an outcome:

- *ok*: it took effect;
- *failed*: it did not take effect and never will;
- *unknown*: it has not ended, or it ended with a timeout, a lost connection or a killed process.

Times are seconds on one clock that all recorders share: a simulation's virtual time, or one machine's monotonic clock.

Several threads and several processes can record one history. Each process writes its own file, line by line, so that
the record survives if the process is killed. ``History.read`` joins the files.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec

Outcome = Literal["ok", "failed", "unknown"]
#: Identifies a message: a history sends each value only once.
Value = str | int
#: The order key of a message.
Key = str | int | None
#: A partition's name and a sequence in it.
Place = tuple[str, int]


class RecordedSend(msgspec.Struct, eq=False):
    """One send of a message."""

    history: DeliveryHistory
    #: The number of the send in the history. Sends of one producer are in the order of its calls.
    number: int
    producer: str
    key: Key
    value: Value
    begun: float
    outcome: Outcome = "unknown"
    ended: float | None = None
    place: Place | None = None
    error: str = ""

    def ok(self, place: Place | None = None, time: float | None = None) -> None:
        """Record that the message is stored."""
        self._end("ok", time, place=place)

    def failed(self, error: object = "", time: float | None = None) -> None:
        """Record that the message is not stored and never will be."""
        self._end("failed", time, error=str(error))

    def unknown(self, error: object = "", time: float | None = None) -> None:
        """Record that the message may be stored, now or later."""
        self._end("unknown", time, error=str(error))

    def _end(self, outcome: Outcome, time: float | None, place: Place | None = None, error: str = "") -> None:
        self.history._write("sent", [self.number, outcome, time, place, error])
        self.outcome, self.ended, self.place, self.error = outcome, time, place, error


class Handling(msgspec.Struct, eq=False):
    """One handling of a message by a consumer."""

    history: DeliveryHistory
    #: The number of the handling in the history. Handlings are numbered in the order in which they begin.
    number: int
    consumer: str
    key: Key
    value: Value
    attempt: int
    epoch: int | None
    lp: int | None
    place: Place | None
    begun: float
    group: str
    outcome: Outcome = "unknown"
    ended: float | None = None
    #: The outcome of the message's ack. None: no ack was recorded.
    ack: Outcome | None = None
    acked: float | None = None

    def done(self, time: float) -> None:
        self._end("ok", time)

    def failed(self, time: float) -> None:
        """Record that the handler failed. The message must be delivered again."""
        self._end("failed", time)

    def unknown(self, time: float) -> None:
        """Record that the handler was interrupted."""
        self._end("unknown", time)

    def _end(self, outcome: Outcome, time: float) -> None:
        self.history._write("handled", [self.number, outcome, time])
        self.outcome, self.ended = outcome, time

    def ack_ok(self, time: float) -> None:
        self._acked("ok", time)

    def ack_failed(self, time: float) -> None:
        self._acked("failed", time)

    def ack_unknown(self, time: float) -> None:
        """Record that the broker may have processed the ack."""
        self._acked("unknown", time)

    def _acked(self, outcome: Outcome, time: float) -> None:
        self.history._write("acked", [self.number, outcome, time])
        self.ack, self.acked = outcome, time


class Broken(msgspec.Struct, eq=False):
    """A fault. It excuses some violations (``plait.testing.checker``)."""

    reason: str
    time: float
    #: When the fault ended.
    until: float
    #: The consumer that the fault hit. None: all consumers.
    consumer: str | None
    #: True if the broker may forget confirmed acks, because power was lost before they were flushed.
    forgets: bool
    #: The broker group whose messages the fault hit. "": all broker groups.
    at: str


class DeliveryHistory:
    """The sends, handlings, faults and dead letters of a test.

    ``path``: the history writes each event to this file as it happens, for a process that may be killed.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.sends: list[RecordedSend] = []
        self.handlings: list[Handling] = []
        self.faults: list[Broken] = []
        #: (group, value) of dead letters.
        self.dead: set[tuple[str, Value]] = set()
        self._open: dict[str, dict[Handling, None]] = {}
        self._lock = threading.RLock()
        # Each start of a process needs a new file, because the numbers of its events start at 0.
        self._file: TextIO | None = None if path is None else open(path, "x", encoding="utf-8")  # noqa: SIM115

    # --- recording ------------------------------------------------------------------------------

    def send(self, key: Key, value: Value, time: float, *, producer: str = "") -> RecordedSend:
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
        with self._lock:
            handling = Handling(self, len(self.handlings), consumer, key, value, attempt, epoch, lp, place, time, group)
            self.handlings.append(handling)
            self._open.setdefault(consumer, {})[handling] = None
            self._write("handle", [handling.number, consumer, key, value, attempt, epoch, lp, place, time, group])
        return handling

    def gone(self, consumer: str, time: float) -> None:
        """Record the death of a consumer: its open handlings end with an unknown outcome."""
        for handling in self._open.pop(consumer, {}):
            if handling.ended is None:
                handling.unknown(time)

    def bury(self, value: Value, *, group: str = "") -> None:
        """Record that a message became a dead letter of the group."""
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
        """Record a fault.

        With ``consumer`` the fault hit only this consumer, and excuses only violations of its handlings. With ``at`` it
        hit only this broker group, and excuses only violations of messages stored there. With both arguments it hit
        only the consumer's requests to the broker group.
        """
        self.faults.append(Broken(reason, time, time if until is None else until, consumer, forgets, at))
        self._write("broken", [reason, time, until, consumer, forgets, at])

    # --- files ----------------------------------------------------------------------------------

    def _write(self, event: str, fields: list[Any]) -> None:
        if self._file is not None:
            with self._lock:
                self._file.write(json.dumps([event, *fields]) + "\n")
                # Flush to the operating system, not to the disk: the line survives if the process is killed.
                self._file.flush()

    def close(self) -> None:
        """Close the file. Later events are not written."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @classmethod
    def read(cls, paths: Iterable[str | Path]) -> DeliveryHistory:
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
        # The sort is stable, so events of one process at the same time keep their order.
        whole.sends = sorted(sends, key=lambda send: send.begun)
        whole.handlings = sorted(handlings, key=lambda handling: handling.begun)
        for number, send in enumerate(whole.sends):
            send.number = number
            send.history = whole
        for number, handling in enumerate(whole.handlings):
            handling.number = number
            handling.history = whole
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
            # An incomplete last line is from a process that was killed while writing it.
            if line.endswith("\n"):
                yield json.loads(line)


def _place(fields: list[Any] | None) -> Place | None:
    return None if fields is None else (fields[0], fields[1])


#: The name that tests import. ``plait.spark.history.History`` is another class.
History = DeliveryHistory
