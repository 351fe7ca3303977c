"""The definitions of a group and its consumers that the action log stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from plait.storage.logs.action_log import GroupDefinition

if TYPE_CHECKING:
    from plait.broker.groups.shared_group import AttachedConsumer
    from plait.broker.partitions.partition import Partition


class GroupDefinitions:
    """A group's definition and its consumers.

    Each change calls ``Partition.redefined``: the segment header of the next action log segment must include it.
    """

    __slots__ = ("_consumers", "consumers", "definition", "id", "name", "partition")

    def __init__(self, definition: GroupDefinition, partition: Partition) -> None:
        #: The group's id, name and settings; only ``redefine`` changes it.
        self.definition = definition
        self.id = definition.id
        self.name = definition.name
        self.partition = partition
        self._consumers: dict[str, AttachedConsumer] = {}
        #: Client id → consumer. Only the methods of this class change it.
        self.consumers: Mapping[str, AttachedConsumer] = self._consumers

    def redefine(self, definition: GroupDefinition) -> None:
        """Change the group's settings."""
        self.definition = definition
        self.partition.redefined()

    def add(self, consumer: AttachedConsumer) -> None:
        """Add a consumer; it replaces an earlier one with the same client id."""
        self._consumers[consumer.client] = consumer
        self.partition.redefined()

    def remove(self, consumer: AttachedConsumer) -> None:
        """Remove a consumer, if it is in the group."""
        if self._consumers.get(consumer.client) is consumer:
            del self._consumers[consumer.client]
            self.partition.redefined()

    def redefine_consumer(self, consumer: AttachedConsumer, client: str, proof: int) -> None:
        """Set the consumer's client id and proof, and add it if it is not in the group."""
        self.remove(consumer)
        consumer._client, consumer._proof = client, proof
        self.add(consumer)
