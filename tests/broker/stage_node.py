"""Helpers for tests of stages: tasks that write, commits that publish."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from plait.broker.partitions.partition import Partition
from plait.errors import PlaitError
from plait.frame.builder import build_frame
from plait.frame.header import FLAG_UNSEQUENCED
from plait.storage.catalog import Stage
from tests.support.broker_node import Node, Sent


class Task:
    """One attempt of a task, and the rows that it wrote for one partition."""

    def __init__(
        self, producer: int, *, subject: str = "orders", query: str = "q", batch: int = 1, delayed: bool = False
    ) -> None:
        self.stage = Stage(producer, query, batch, delayed)
        self.subject = subject
        self.count = 0
        self.bodies: list[bytes] = []

    @property
    def named(self) -> tuple[int, int]:
        """(producer, rows), as a commit names the stage."""
        return self.stage.producer, self.count

    def open(self, node: Node) -> Partition:
        partition = node.broker.stages.open(self.subject, self.stage)
        node.turn()
        return partition

    def frame(self, *bodies: bytes, **columns: Any) -> Sent:
        """The next frame of the stage."""
        parts = build_frame(
            bodies, producer=self.stage.producer, first=self.count + 1, flags=FLAG_UNSEQUENCED, **columns
        )
        self.count += len(bodies)
        self.bodies += bodies
        return Sent(self.subject, parts.tobytes(), bodies)

    def submit(self, node: Node, sent: Sent) -> Sent:
        """Send a frame; an immediate refusal becomes its error."""
        try:
            node.broker.submit(self.open(node), sent.view, sent.answer)
        except PlaitError as error:
            sent.answer(None, error)
        node.turn()
        return sent

    def write(self, node: Node, *bodies: bytes, **columns: Any) -> Sent:
        """Stage rows."""
        sent = self.submit(node, self.frame(*bodies, **columns))
        assert sent.acknowledged, sent.answers
        return sent


def complete(node: Node, *tasks: Task) -> None:
    """Complete tasks: the rows that they wrote are durable."""
    answers: list[PlaitError | None] = []
    node.broker.stages.complete([task.named for task in tasks], answers.append)
    node.turn()
    assert answers == [None]


def ask(node: Node, tasks: Iterable[Task]) -> list[PlaitError | None]:
    """Request publishing of stages; the reply is appended to the returned list."""
    answers: list[PlaitError | None] = []
    node.broker.publisher.publish([task.named for task in tasks], answers.append)
    return answers


def publish(node: Node, *tasks: Task) -> None:
    """Publish stages, in as many turns as needed."""
    answers = ask(node, tasks)
    for _ in range(1000):
        if answers:
            break
        node.turn()
    assert answers == [None]


def staged(node: Node) -> int:
    """The number of stages."""
    return len(node.broker.stages)


def settle(node: Node) -> None:
    """Finish all publishing that has begun."""
    for _ in range(1000):
        node.broker.run_timers()
        node.turn()
        if not node.broker.publisher.ready:
            return
    raise AssertionError("publishing does not end")


def ask_and_settle(node: Node, *tasks: Task) -> PlaitError | None:
    """Request publishing of stages, and wait for the reply."""
    answers = ask(node, tasks)
    settle(node)
    [error] = answers
    return error
