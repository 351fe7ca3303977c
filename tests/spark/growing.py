"""An archive that grows beside its broker, in a test's hands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plait.sync
from plait.testing.embedded_broker import BlockingBroker
from tests.spark.archives import archive_here


class Growing:
    """A broker on virtual time, and what was archived of it; ``run_job`` has to run here."""

    def __init__(self, broker: BlockingBroker, to: Path) -> None:
        self.broker = broker
        self.to = to
        self._sent = 0

    @property
    def place(self) -> dict[str, Any]:
        """How a reader is told of the archive."""
        return {"path": self.to}

    def send(self, *sent: bytes, subject: str = "orders") -> None:
        """One message a second; their keys descend, so that a file, which is sorted by them, has them the other way."""
        with plait.sync.connect(self.broker.address) as client:
            for body in sent:
                self._sent += 1
                client.send(subject, body, key=f"key-{9999 - self._sent}")
                self.broker.advance(1.0)

    def make_anew(self, subject: str = "orders") -> None:
        """Delete a subject; what is sent to it next is of another life."""
        with plait.sync.connect(self.broker.address) as client:
            client.admin.delete_subject(subject)

    def archive(self, **options: Any) -> None:
        """Everything up to now."""
        archive_here(self.broker.data, self.to, now=True, **options)

    def grow(self, *runs: Sequence[bytes]) -> None:
        """Send and archive, a file for each run."""
        for bodies in runs:
            self.send(*bodies)
            self.archive()

    def compact(self) -> None:
        """Merge files, and remove those that were merged: two commits later nobody has a right to them."""
        archive_here(None, self.to, compact=True)
        self.send(b"later", subject="others")
        self.archive()
        self.send(b"later", subject="others")
        self.archive()
