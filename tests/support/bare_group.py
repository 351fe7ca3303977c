"""A shared group without a broker, driven by the events of an action log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from plait.broker.groups.shared_group import SharedGroup
from plait.limits import ServerLimits
from plait.storage.logs.action_events import EVENT, Action, unpack_event
from plait.storage.logs.action_log import GroupDefinition


class BareGroup:
    """Applies events to a group as replay does."""

    def __init__(self, start: int = 0, *, broadcast: bool = False) -> None:
        definition = GroupDefinition(1, 1, "g", start, broadcast, "at_least_once", 0)
        partition = cast("Any", SimpleNamespace(addressed=False))
        self.group = SharedGroup(definition, partition, ServerLimits(), cast("Any", None))

    @property
    def cursor(self) -> Any:
        return self.group.cursor

    @property
    def failures(self) -> Any:
        return self.group.failures

    def event(
        self,
        action: Action,
        holder: int = 0,
        start: int = 0,
        end: int = 0,
        attempt: int = 0,
        due: int = 0,
        time: int = 1,
        *,
        counted: bool = True,
    ) -> None:
        row = np.array((1, 1, action, attempt, not counted, holder, start, end, due), EVENT)
        *_, event = unpack_event(row.tobytes())
        self.group.replay(event, time)
