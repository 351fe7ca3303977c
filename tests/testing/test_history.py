"""Histories: recorded by several threads, written line by line, joined from the files of several processes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from plait.testing.checker import check
from plait.testing.history import History


def record(history: History) -> None:
    send = history.send("k", "m-1", 1.0, producer="p")
    send.ok(("s@g1", 4), 1.5)
    history.send("k", "m-2", 2.0, producer="p").failed("refused", 2.5)
    history.send(None, "m-3", 3.0, producer="p").unknown("time-out", 3.5)
    handling = history.handle("c", "k", "m-1", 2, 7, 99, ("s@g1", 4), 4.0, group="g")
    handling.done(4.5)
    handling.ack_ok(5.0)
    history.bury("m-3", group="g")
    history.broken("killed", 6.0, until=7.0, consumer="c", forgets=True)
    history.broken("paused", 6.0, at="g1")


def described(history: History) -> list[object]:
    sends = [
        (s.number, s.producer, s.key, s.value, s.begun, s.ended, s.outcome, s.place, s.error) for s in history.sends
    ]
    handlings = [
        (h.number, h.consumer, h.key, h.value, h.attempt, h.epoch, h.lp, h.place, h.begun, h.group, h.ended, h.outcome,
         h.ack, h.acked)
        for h in history.handlings
    ]  # fmt: skip
    faults = [(f.reason, f.time, f.until, f.consumer, f.forgets, f.at) for f in history.faults]
    return [sends, handlings, faults, sorted(history.dead)]


def test_a_written_history_is_read_back(tmp_path: Path):
    history = History(tmp_path / "one.jsonl")
    record(history)
    history.close()
    assert described(History.read([tmp_path / "one.jsonl"])) == described(history)


def test_an_incomplete_line_of_a_killed_process_is_ignored(tmp_path: Path):
    path = tmp_path / "one.jsonl"
    history = History(path)
    history.send("k", 1, 1.0)
    history.send("k", 2, 2.0)
    history.close()
    path.write_text(path.read_text()[:-3])
    assert [send.value for send in History.read([path]).sends] == [1]


def test_every_event_is_written_immediately(tmp_path: Path):
    history = History(tmp_path / "one.jsonl")
    send = history.send("k", 1, 1.0)
    assert len(History.read([tmp_path / "one.jsonl"]).sends) == 1
    send.ok()
    assert History.read([tmp_path / "one.jsonl"]).sends[0].outcome == "ok"
    history.close()


def test_the_files_of_several_processes_are_joined_by_time(tmp_path: Path):
    producer, consumer = History(tmp_path / "producer.jsonl"), History(tmp_path / "consumer.jsonl")
    for value in range(3):
        producer.send("k", value, float(value), producer="p").ok(None, value + 0.5)
    for value in range(3):
        consumer.handle("c", "k", value, time=value + 0.75).done(value + 0.9)
    consumer.handle("c", "k", "torn", time=9.0)
    producer.close()
    consumer.close()
    whole = History.read([tmp_path / "consumer.jsonl", tmp_path / "producer.jsonl"])
    assert [send.value for send in whole.sends] == [0, 1, 2]
    whole.gone("c", 10.0)
    assert whole.handlings[-1].ended == 10.0
    assert {violation.kind for violation in check(whole)} == {"invented"}


def test_an_existing_file_is_refused(tmp_path: Path):
    History(tmp_path / "one.jsonl").close()
    with pytest.raises(FileExistsError):
        History(tmp_path / "one.jsonl")


def test_a_file_that_is_not_a_history_is_refused(tmp_path: Path):
    (tmp_path / "one.jsonl").write_text('["dance", 1]\n')
    with pytest.raises(ValueError, match="dance"):
        History.read([tmp_path / "one.jsonl"])


def test_several_threads_record_at_once(tmp_path: Path):
    history = History(tmp_path / "one.jsonl")

    def work(name: str) -> None:
        for number in range(200):
            history.send("k", f"{name}-{number}", 0.0, producer=name).ok()
            history.handle(name, "k", f"{name}-{number}", time=1.0).done(1.0)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history.close()
    assert [send.number for send in history.sends] == list(range(800))
    assert {send.outcome for send in History.read([tmp_path / "one.jsonl"]).sends} == {"ok"}
