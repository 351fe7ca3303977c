"""Writes the golden data directories: ``python -m tests.golden.make_data``.

Each is an archive of a data directory as a server left it, and a JSON file with its content: the state of the writer
when it stopped, not the state that it read back. An existing file is never written again, because data directories in
use have the same format. For a new one, add an entry to ``DIRECTORIES``.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from plait.broker import Attachments, Broker, BrokerConfig, Retention
from plait.broker.groups.group import AttachedConsumer, NackOutcome
from plait.broker.partitions.partition import Delivery
from plait.clock import ManualClock
from plait.errors import PlaitError
from plait.frame.builder import build_frame
from plait.frame.columns import TAG_SEPARATOR
from plait.frame.header import FLAG_UNSEQUENCED
from plait.frame.view import FrameView
from plait.model.settings import SubjectSettings
from plait.storage.disk import RealDisk

DIRECTORY = Path(__file__).parent / "data"
#: A Tuesday in November 2023.
NOW = 1_700_000_000_000_000

Row = dict[str, Any]


class Writer:
    """A broker without a loop; records the rows that it stored."""

    def __init__(self, root: Path, **settings: Any) -> None:
        config = BrokerConfig(
            **{"message_segment_size": 16 * 1024, "action_segment_size": 8 * 1024, "disk_free_min": 0} | settings
        )
        self.root = root
        self.clock = ManualClock(NOW)
        self.rows: dict[str, list[Row]] = {}
        self._config = config
        self._next: dict[int, int] = {}
        self._last: dict[tuple[int, str], int] = {}
        self.start()

    def start(self) -> None:
        self.broker = Broker(RealDisk(self.root), self.clock, self._config)
        self.broker.start()
        self.membership = Attachments(self.broker)

    def turn(self) -> None:
        """End a loop turn."""
        self.broker.turn.commit()
        assert self.broker.turn.failed is None
        if self.broker.turn.sync_wanted:
            self.sync()

    def sync(self) -> None:
        work = self.broker.turn.begin_sync()
        work.run()
        self.broker.turn.end_sync(work)

    def checkpoint(self) -> None:
        self.broker.snapshots.make()

    def submit(
        self,
        subject: str,
        producer: int,
        bodies: list[bytes],
        *,
        keys: list[str] | None = None,
        tags: list[list[str]] | None = None,
        headers: list[dict[str, Any]] | None = None,
        send_time: int | None = None,
        compression: str | None = None,
        oneway: bool = False,
    ) -> None:
        """Submit a frame, built as a client builds it."""
        count = len(bodies)
        first = self._next.get(producer, 1)
        self._next[producer] = first + count
        previous = 0 if oneway else self._last.get((producer, subject), 0)
        frame = build_frame(
            bodies,
            producer=producer,
            first=first,
            previous=previous,
            send_time=send_time,
            keys=None if keys is None else [key.encode() for key in keys],
            key_hashes=None
            if keys is None
            else np.fromiter((xxh3_64_intdigest(key.encode()) for key in keys), np.uint64, count),
            tags=None if tags is None else [_joined(row) for row in tags],
            headers=None if headers is None else [msgspec.msgpack.encode(row) if row else b"" for row in headers],
            compression=compression,
            flags=FLAG_UNSEQUENCED if oneway else 0,
        )
        epoch = self.broker.turn.epoch

        def stored(sequence: int | None, error: PlaitError | None) -> None:
            now = self.clock.now()
            assert error is None, error
            assert sequence is not None
            for row, body in enumerate(bodies):
                self.rows.setdefault(subject, []).append(
                    {
                        "sequence": sequence + row,
                        "id": f"{producer:016x}-{first + row}",
                        "body": body.hex(),
                        "key": keys[row] or None if keys else None,
                        "tags": tags[row] if tags else [],
                        "headers": headers[row] if headers else {},
                        "send_time": send_time,
                        "store_time": now,
                        "epoch": epoch,
                    }
                )

        partition, view = self.broker.partition_of(subject), FrameView(frame.tobytes())
        if oneway:
            # A oneway frame gets no receipt; it is the only frame of its turn, so its sequence is known.
            sequence = partition.next
            self.broker.submit(partition, view, None)
            self.broker.turn.answer_after_commit(lambda: stored(sequence, None))
            return
        self._last[producer, subject] = first + count - 1
        self.broker.submit(partition, view, stored)

    def send(self, subject: str, producer: int, bodies: list[bytes], **columns: Any) -> None:
        self.submit(subject, producer, bodies, **columns)
        self.clock.advance(0.001)
        self.turn()

    def attach(self, subject: str, group: str | None, client: str, **settings: Any) -> AttachedConsumer:
        consumer = self.membership.attach(subject, group, client, **settings)
        self.turn()
        return consumer

    def pull(self, consumer: AttachedConsumer, count: int) -> None:
        taken: list[Delivery | None] = []
        self.broker.pull(consumer, count, 1 << 20, 0, taken.append)
        self.turn()
        if consumer.group.definition.delivery == "at_most_once":
            self.sync()
        assert taken[0] is not None

    def ack(self, consumer: AttachedConsumer, start: int, end: int) -> None:
        self.broker.ack(consumer, [(start, end, self.broker.turn.epoch)], None)
        self.turn()

    def nack(self, consumer: AttachedConsumer, start: int, end: int) -> None:
        self.broker.nack(consumer, [(start, end, self.broker.turn.epoch)], None, NackOutcome(0.0))
        self.turn()

    def kill(self) -> None:
        """Stop as a killed process does: only written bytes remain."""
        self.broker.message_log.close()
        self.broker.action_log.close()

    def content(self, **facts: Any) -> dict[str, Any]:
        """The state that the next start must recover."""
        broker = self.broker
        subjects = {
            name: {
                "start": partition.start,
                "end": partition.visible,
                "rows": [row for row in self.rows.get(name, []) if row["sequence"] >= partition.start],
                "groups": {
                    group.name: {
                        "next": group.cursor.next,
                        "floor": group.cursor.floor,
                        "returned": [list(piece) for piece in group.cursor.returned],
                        "held": {
                            consumer.client: [list(piece) for piece in group.cursor.held[consumer.id]]
                            for consumer in group.consumers.values()
                            if consumer.id in group.cursor.held
                        },
                        "broadcast": group.definition.broadcast,
                        "delivery": group.definition.delivery,
                    }
                    for group in partition.groups.values()
                },
                "producers": {
                    f"{producer:016x}": window.last
                    for producer in broker.producers.ids()
                    if (window := broker.producers.window(producer, partition.id)) is not None
                },
            }
            for name, partition in sorted(broker.subjects.items())
        }
        return (
            {"clean": False, "epoch": broker.turn.epoch + 1, "torn": [], "time": self.clock.now()}
            | facts
            | {"subjects": subjects}
        )


def _joined(tags: list[str]) -> bytes:
    return (TAG_SEPARATOR + TAG_SEPARATOR.join(tags) + TAG_SEPARATOR).encode() if tags else b""


def _fill(writer: Writer) -> None:
    """Send messages, and bring groups into every state."""
    for number in range(30):
        writer.send("orders", 0xA1, [b"order %d.%d" % (number, row) for row in range(3)])
    writer.send("empty.of.rows", 0xA1, [b"only one"])
    shared = [writer.attach("orders", "billing", client) for client in ("one", "two")]
    for consumer in shared:
        writer.pull(consumer, 20)
    writer.ack(shared[0], 0, 10)
    writer.ack(shared[0], 12, 15)
    writer.nack(shared[1], 25, 30)
    done = writer.attach("orders", "audit", "auditor")
    writer.pull(done, 90)
    writer.ack(done, 0, 90)
    once = writer.attach("orders", "once", "oncer", delivery="at_most_once")
    writer.pull(once, 7)
    broadcast = writer.attach("orders", None, "everyone", start="earliest")
    writer.pull(broadcast, 10)
    writer.ack(broadcast, 0, 5)
    writer.attach("orders", "late", "latecomer", start="latest")


def _clean(writer: Writer) -> dict[str, Any]:
    _fill(writer)
    content = writer.content(clean=True, epoch=writer.broker.turn.epoch)
    writer.broker.stop()
    return content


def _crashed(writer: Writer) -> dict[str, Any]:
    _fill(writer)
    writer.checkpoint()
    writer.kill()
    writer.start()
    for number in range(30):
        writer.send("orders", 0xB2, [b"after a crash %d" % number])
    consumer = writer.attach("orders", "billing", "three")
    writer.pull(consumer, 60)
    writer.ack(consumer, 90, 95)
    content = writer.content()
    writer.kill()
    return content


def _torn(writer: Writer) -> dict[str, Any]:
    _fill(writer)
    writer.sync()
    content = writer.content(torn=["action", "message"])
    message_end, action_end = writer.broker.message_log.end, writer.broker.action_log.end
    writer.send("orders", 0xA1, [b"this one was never finished, so it was never acknowledged"])
    writer.membership.attach("orders", "too late", "absent")
    writer.turn()
    writer.kill()
    for log, end in (("message", message_end), ("action", action_end)):
        segment = max((writer.root / log).glob("*.log"))
        data = bytearray(segment.read_bytes())
        at = end - int(segment.stem)
        data[at + 96 :] = bytes(len(data) - at - 96)
        segment.write_bytes(data)
    content["time"] = writer.clock.now()
    return content


def _columns(writer: Writer) -> dict[str, Any]:
    """Joined frames of several producers, compressed frames, and every column that a client can set."""
    for turn in range(4):
        for producer in range(1, 6):
            writer.submit("joined", producer, [b"%d of %d" % (turn, producer)], send_time=NOW + turn)
        writer.clock.advance(0.001)
        writer.turn()
    for turn in range(3):
        for producer in range(1, 4):
            writer.submit(
                "joined.tagged",
                producer,
                [b"tagged %d" % row for row in range(2)],
                keys=[f"kéy-{row}" if row else "" for row in range(2)],
                tags=[["new", "größe"][: row + 1] for row in range(2)],
                headers=[{"city": "BJS", "amount": turn, "rate": 0.5, "vip": True} if row else {} for row in range(2)],
                send_time=NOW + producer,
            )
        writer.clock.advance(0.001)
        writer.turn()
    for compression in ("zstd", "lz4"):
        for number in range(3):
            writer.send(
                f"packed.{compression}",
                0xC3,
                [b"a body that repeats itself, " * 8 + b"%d.%d" % (number, row) for row in range(8)],
                keys=[str(row) for row in range(8)],
                headers=[{"row": row, "text": "again and again " * 5} for row in range(8)],
                send_time=NOW,
                compression=compression,
            )
    for number in range(5):
        writer.send("oneway", 0xD4, [b"fire and forget %d" % number], oneway=True)
    assert any(frame.count == 5 for frame in _frames(writer, "joined"))
    consumer = writer.attach("packed.zstd", "g", "c")
    writer.pull(consumer, 11)
    writer.ack(consumer, 3, 6)
    content = writer.content()
    writer.kill()
    return content


def _frames(writer: Writer, subject: str) -> list[FrameView]:
    partition = writer.broker.subjects[subject]
    log = partition.consume_log
    records = [log.record(index) for index in range(len(log))]
    return [FrameView(writer.broker.message_log.view(record.offset, record.size)) for record in records]


def _retained(writer: Writer) -> dict[str, Any]:
    """Retention removed the first segments, a subject was deleted, and a group lost rows to retention."""
    writer.broker.create_subject("short", SubjectSettings(retention_seconds=60.0))
    writer.broker.create_subject("long", SubjectSettings(retention_bytes=1 << 20))
    writer.turn()
    slow = writer.attach("short", "slow", "c")
    for number in range(80):
        writer.send("short", 0xA1, [b"old %d " % number * 40])
    writer.pull(slow, 3)
    writer.ack(slow, 0, 2)
    writer.send("gone", 0xA1, [b"deleted"])
    writer.broker.delete_subject("gone")
    writer.rows.pop("gone")
    writer.turn()
    writer.clock.advance(120)
    for number in range(20):
        writer.send("short", 0xA1, [b"young %d " % number * 40])
        writer.send("long", 0xB2, [b"kept %d" % number])
    for _ in range(6):
        writer.send("long", 0xB2, [b"x"])
        writer.checkpoint()
    retention = Retention(writer.broker)
    retention.run()
    writer.turn()
    # Unacked rows of a group are copied to the retained log first; segments are removed when the copies are durable.
    writer.sync()
    retention.run()
    assert writer.broker.message_log.start > 0
    writer.checkpoint()
    content = writer.content()
    writer.kill()
    return content


#: Name → the function that fills a directory with a new writer and returns its content.
DIRECTORIES: dict[str, Callable[[Writer], dict[str, Any]]] = {
    "clean": _clean,
    "crashed": _crashed,
    "torn": _torn,
    "columns": _columns,
    "retained": _retained,
}


def extract(name: str, root: Path) -> None:
    """Unpack a golden directory."""
    with tarfile.open(DIRECTORY / f"{name}.tar.xz") as archive:
        archive.extractall(root, filter="data")


def _pack(root: Path, target: Path) -> None:
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for path in sorted(root.rglob("*")):
            if path.name != "LOCK":
                entry = archive.gettarinfo(path, str(path.relative_to(root)))
                entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
                with path.open("rb") if path.is_file() else tempfile.TemporaryFile() as file:
                    archive.addfile(entry, file if path.is_file() else None)


def _text(content: dict[str, Any]) -> str:
    """JSON with one message per line."""
    rows = [row for subject in content["subjects"].values() for row in subject["rows"]]
    text = json.dumps(content, indent=1)
    for row in rows:
        indented = json.dumps(row, indent=1).replace("\n", "\n    ")
        text = text.replace(indented, json.dumps(row, ensure_ascii=False))
    return text


def main() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    for name, make in DIRECTORIES.items():
        target = DIRECTORY / f"{name}.tar.xz"
        if target.exists():
            print(f"{target.name}: frozen")
            continue
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch)
            content = make(Writer(root))
            _pack(root, target)
        (DIRECTORY / f"{name}.json").write_text(_text(content) + "\n")
        print(f"{target.name}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
