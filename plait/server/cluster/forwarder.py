"""Forwards delayed rows whose LP moved before they became due, to the partition that accepts them now.

``broker.forwards`` decides what is sent where, in order and exactly once. This module does the network and the timing:
it gets routes from a meta server, sends each frame once it is durable here, and retries.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import numpy as np

from plait import tasks
from plait.broker.partitions.partition import Partition
from plait.broker.schedule.forwards import ForwardRoute, WaitingForward
from plait.errors import (
    OutOfSequence,
    PlaitError,
    ProducerConflict,
    StaleRoute,
    Timeout,
    Unavailable,
    UnknownProducer,
)
from plait.frame.view import FrameView
from plait.limits import LOGICAL_PARTITIONS
from plait.server.broker_host import BrokerHost
from plait.server.cluster.cluster_role import ClusterRole
from plait.server.cluster.links import Links
from plait.server.notices import Notices
from plait.wire import messages as m

log = logging.getLogger("plait.server")

#: Timeout of a request to a broker, which is then repeated later.
SEND_SECONDS: Final = 5.0
#: Pause before a failed send, or a route that did not help, is retried.
PAUSE_SECONDS: Final = 0.2


class Forwarder:
    """Sends the rows of a broker's forward partitions."""

    def __init__(self, host: BrokerHost, cluster: ClusterRole) -> None:
        self._host = host
        self._cluster = cluster
        self._broker = host.broker
        self._forwards = host.broker.forwards
        self._work = asyncio.Event()
        self._forwards.on_work = self._work.set
        #: Broker group → its addresses, from the last route that names it.
        self._addresses: dict[str, list[str]] = {}
        self._links = Links("%forward", SEND_SECONDS)
        #: Subject → when its route was last requested, on the loop's clock.
        self._asked: dict[str, float] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        #: Subjects without a route, and partitions whose rows cannot be sent.
        self._notices = Notices(log)
        # Rows left over from a crash are sent first.
        self._work.set()

    async def run(self) -> None:
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                for partition in self._forwards.waiting():
                    if partition.id not in self._tasks:
                        task = tasks.start(self._empty(partition), "plait-server-forward")
                        self._tasks[partition.id] = task
                        task.add_done_callback(lambda _, number=partition.id: self._tasks.pop(number))  # type: ignore[misc]
                # After the tasks: rows with a known route do not wait for a meta server.
                await self._find_routes()
        finally:
            for task in list(self._tasks.values()):
                task.cancel()
            self._links.close()

    async def _find_routes(self) -> None:
        """Request the routes that rows wait for. A failed request is repeated after a pause."""
        now = asyncio.get_running_loop().time()
        self._asked = {subject: at for subject, at in self._asked.items() if now < at + PAUSE_SECONDS}
        for subject in sorted(self._forwards.unrouted):
            if not self._broker.schedules.postponed(subject):
                # Its partitions were dropped with their delayed rows.
                self._forwards.unrouted.discard(subject)
                continue
            if subject in self._asked:
                # The last route did not help: the LP is sealed and its new route is not published yet.
                self._look_later()
                continue
            self._asked[subject] = now
            try:
                await self._find(subject)
            except PlaitError as error:
                # Temporary: the partitions of a deleted subject are dropped soon, and a lost database is rebuilt soon.
                self._notices.begin(
                    f"subject {subject}",
                    f"delayed messages of subject {subject} wait for its route: {error}",
                    error.code,
                )
                self._look_later()
                if isinstance(error, Unavailable | Timeout):
                    # The next request would time out as well.
                    return
            else:
                self._notices.end(
                    f"subject {subject}",
                    f"the route of subject {subject} is known again; its delayed messages are forwarded",
                )
                self._host.arm_timer()

    def _look_later(self) -> None:
        asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._work.set)

    async def _find(self, subject: str) -> m.RouteReply:
        found = await self._cluster.route(subject)
        table = np.zeros(LOGICAL_PARTITIONS, np.int64)
        for first, end, spans in found.histories:
            table[first:end] = spans[-1][0]
        self._addresses.update({group: addresses for group, (addresses, _) in found.brokers.items()})
        self._forwards.learn(subject, ForwardRoute(table, [(name, group) for name, group in found.partitions]))
        return found

    async def _empty(self, partition: Partition) -> None:
        """Send the rows of one forward partition, frame by frame."""
        name = partition.row.name
        try:
            while (waiting := self._forwards.first(partition)) is not None:
                if self._broker.message_log.durable < waiting.log_end:
                    # Send only durable frames: after a crash the same producer sequences would be given to other rows.
                    await self._durable()
                    continue
                if not await self._sent(partition, waiting):
                    return
                self._notices.end(str(partition.id), f"delayed messages of partition {name} are forwarded again")
        except PlaitError as error:
            # One notice for all errors: an absent broker may refuse, time out or be unregistered in turn.
            self._notices.begin(
                str(partition.id),
                f"delayed messages of partition {name} cannot be forwarded yet: {error}; this is retried",
                "waits",
            )
            self._look_later()
        except Exception:
            log.exception("delayed messages of partition %s were not forwarded; this is retried", name)
            self._look_later()

    async def _sent(self, partition: Partition, waiting: WaitingForward) -> bool:
        """Send one frame. Returns False if the remaining rows were taken back, to be forwarded by another route."""
        forward = partition.row.forward
        assert forward is not None
        try:
            await self._store(forward.name, forward.group, bytes(waiting.frame.buffer))
        except (OutOfSequence, ProducerConflict, UnknownProducer) as error:
            log.warning(
                "delayed messages are sent to partition %s@%s under a new producer id: %s",
                forward.name,
                forward.group,
                error,
            )
            await self._take_back(partition)
            return False
        except (StaleRoute, Unavailable, Timeout) as error:
            found = await self._find(partition.row.subject)
            refused = isinstance(error, StaleRoute) and not self._forwards.fits(partition, waiting.frame)
            if refused or (forward.name, forward.group) not in found.partitions:
                await self._take_back(partition)
                return False
            # The broker is down, or has not applied the new route yet.
            raise
        self._forwards.stored(partition, waiting.end)
        return True

    async def _take_back(self, partition: Partition) -> None:
        while not self._forwards.take_back(partition):
            # Wait for the disk between two steps.
            await self._durable()

    async def _store(self, name: str, group: str, frame: bytes) -> None:
        """Send a frame to a partition of a broker group, which may be this broker's own."""
        if group == self._host.config.group:
            await self._store_here(name, frame)
            return
        addresses = self._addresses.get(group)
        if not addresses:
            raise Unavailable(f"the address of broker group {group} is not known yet")
        routed: m.PartitionNumberReply = await self._links.request(addresses[0], m.PartitionNumberRequest(name))
        await self._links.request(addresses[0], m.SendRequest(routed.partition), [frame], len(frame))

    async def _store_here(self, name: str, frame: bytes) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def reply(_: int | None, error: PlaitError | None) -> None:
            if not done.done():
                if error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)

        self._broker.submit(self._broker.partition_of(name), FrameView(frame), reply)
        await done

    async def _durable(self) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._broker.turn.answer_when_durable(lambda: None if done.done() else done.set_result(None))
        await done
