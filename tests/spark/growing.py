"""An archive that grows beside its broker, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plait.sync
from plait.testing.embedded_broker import BlockingBroker
from tests.spark.archives import archive_here


class Growing:
    """A broker on virtual time and its archive.

    Use it with the fixture ``here``, which lets the archiver run its tasks in this process.
    """

    def __init__(self, broker: BlockingBroker, to: Path) -> None:
        self.broker = broker
        self.to = to
        self._sent = 0

    @property
    def place(self) -> dict[str, Any]:
        """The options with which a reader opens the archive."""
        return {"path": self.to}

    def send(self, *sent: bytes, subject: str = "orders") -> None:
        """Send one message per second. Each key is lower than the one before. So a file, which is sorted by key, has
        the messages of a run last one first.
        """
        with plait.sync.connect(self.broker.address) as client:
            for body in sent:
                self._sent += 1
                client.send(subject, body, key=f"key-{9999 - self._sent}")
                self.broker.advance(1.0)

    def recreate(self, subject: str = "orders") -> None:
        """Delete a subject; messages sent to it later belong to its next life."""
        with plait.sync.connect(self.broker.address) as client:
            client.admin.delete_subject(subject)

    def archive(self, **options: Any) -> None:
        """Archive everything up to now."""
        archive_here(self.broker.data, self.to, now=True, **options)

    def grow(self, *runs: Sequence[bytes]) -> None:
        """Send and archive; each run makes a file."""
        for bodies in runs:
            self.send(*bodies)
            self.archive()

    def compact(self) -> None:
        """Merge files, then archive two more times. The archiver has then removed the files that it merged."""
        archive_here(None, self.to, compact=True)
        self.send(b"later", subject="others")
        self.archive()
        self.send(b"later", subject="others")
        self.archive()
