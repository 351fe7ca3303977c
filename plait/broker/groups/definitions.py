"""What the action log defines of a group: itself and its members, changed in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from plait.storage.logs.action_log import GroupDefinition

if TYPE_CHECKING:
    from plait.broker.groups.shared_group import AttachedConsumer
    from plait.broker.partitions.partition import Partition


class GroupDefinitions:
    """A group's definition and its consumers.

    Each change is noted at the partition (``Partition.redefined``): the head of the next segment of the action log has
    to say it.
    """

    __slots__ = ("_consumers", "_definition", "consumers", "partition")

    def __init__(self, definition: GroupDefinition, partition: Partition) -> None:
        self._definition = definition
        self.partition = partition
        self._consumers: dict[str, AttachedConsumer] = {}
        #: By client; changed by the methods here alone.
        self.consumers: Mapping[str, AttachedConsumer] = self._consumers

    @property
    def definition(self) -> GroupDefinition:
        """Its settings, under its name and number."""
        return self._definition

    @property
    def id(self) -> int:
        return self._definition.id

    @property
    def name(self) -> str:
        return self._definition.name

    def redefine(self, definition: GroupDefinition) -> None:
        """Its settings have changed."""
        self._definition = definition
        self.partition.redefined()

    def add(self, consumer: AttachedConsumer) -> None:
        """It is a member, in place of an earlier one of the same name."""
        self._consumers[consumer.client] = consumer
        self.partition.redefined()

    def remove(self, consumer: AttachedConsumer) -> None:
        """It is no member any more, if it was one."""
        if self._consumers.get(consumer.client) is consumer:
            del self._consumers[consumer.client]
            self.partition.redefined()

    def redefine_consumer(self, consumer: AttachedConsumer, client: str, proof: int) -> None:
        """It is a member under this name and with this proof, whatever it was before."""
        self.remove(consumer)
        consumer._client, consumer._proof = client, proof
        self.add(consumer)
