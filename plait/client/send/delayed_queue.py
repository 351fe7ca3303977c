"""The queue of delayed rows of one partition. They go to its schedule, in frames that have a due time for each row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from plait.client.send.open_rows import OpenRows
from plait.client.send.partition_queue import PartitionQueue
from plait.client.types import PendingBatch, Ticket


class DelayedQueue(PartitionQueue):
    """A ``PartitionQueue`` whose rows have due times."""

    __slots__ = ()

    def _new_rows(self) -> OpenRows:
        return OpenRows([])

    def post_at(
        self,
        due: int,
        body: Any,
        key: str | int | None,
        tags: Iterable[str] | None,
        headers: Mapping[str, Any] | None,
    ) -> Ticket:
        """``post`` a row with its due time."""
        dues = self._due_times(due)
        try:
            return self.post(body, key, tags, headers)
        except BaseException:
            dues.pop()
            raise

    def send_at(
        self,
        due: int,
        body: Any,
        key: str | int | None,
        tags: Iterable[str] | None,
        headers: Mapping[str, Any] | None,
    ) -> tuple[PendingBatch, int]:
        """``send`` a row with its due time."""
        dues = self._due_times(due)
        try:
            return self.send(body, key, tags, headers)
        except BaseException:
            dues.pop()
            raise

    def _due_times(self, due: int) -> list[int]:
        """Append the due time before the row, because adding the row may seal the frame.

        The caller removes it again if the row is refused.
        """
        dues = self._rows.dues
        assert dues is not None
        dues.append(due)
        return dues
