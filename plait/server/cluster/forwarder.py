"""Sends delayed rows that became due after their logical partition had moved to the partition that takes them now.

What is sent, to where and how it stays in order and happens once is decided by ``broker.forwards``. Here are the
network and time: routes come from a meta server, each frame is sent when it is durable here, and what cannot be sent
yet is tried again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

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
from plait.server.cluster.links import Links
from plait.server.notices import Notices
from plait.wire import messages as m

if TYPE_CHECKING:
    from plait.server.broker_server import Server

log = logging.getLogger("plait.server")

#: A broker that does not answer within this is asked again later.
SEND_SECONDS: Final = 5.0
#: Time before what could not be sent, or a route that did not help, is tried again.
PAUSE_SECONDS: Final = 0.2


class Forwarder:
    """Empties the forward partitions of a broker."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._broker = server.broker
        self._forwards = server.broker.forwards
        self._work = asyncio.Event()
        self._forwards.on_work = self._work.set
        #: Broker group → where it can be reached, as of the last route that names it.
        self._addresses: dict[str, list[str]] = {}
        self._links = Links("%forward", SEND_SECONDS)
        #: When each route was asked for last, on the loop's clock.
        self._asked: dict[str, float] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        #: Subjects whose route cannot be found, and partitions whose rows cannot be sent.
        self._astray = Notices(log)
        self._stuck = Notices(log)
        # What a crash left behind is sent first.
        self._work.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                for partition in self._forwards.waiting():
                    if partition.id not in self._tasks:
                        task = tasks.start(self._empty(partition), "plait-server-forward")
                        self._tasks[partition.id] = task
                        task.add_done_callback(lambda _, number=partition.id: self._tasks.pop(number))  # type: ignore[misc]
                # What can be sent does not wait for a meta server.
                await self._find_routes()
        finally:
            for task in list(self._tasks.values()):
                task.cancel()
            self._links.close()

    async def _find_routes(self) -> None:
        """Routes that rows wait for; one that cannot be had is asked for again after a pause."""
        now = asyncio.get_running_loop().time()
        self._asked = {subject: at for subject, at in self._asked.items() if now < at + PAUSE_SECONDS}
        for subject in sorted(self._forwards.astray):
            if not self._broker.schedules.any_held(subject):
                # Its partitions were dropped, with all that waited there.
                self._forwards.astray.discard(subject)
                continue
            if subject in self._asked:
                # It did not help: rows are between a seal and the route that follows it.
                self._look_later()
                continue
            self._asked[subject] = now
            try:
                await self._find(subject)
            except PlaitError as error:
                # A deleted subject's partitions are dropped soon; those of a lost database are known again soon.
                self._astray.begin(subject, f"delayed messages of {subject} wait for its route: {error}", error.code)
                self._look_later()
                if isinstance(error, Unavailable | Timeout):
                    # The next one would wait as long for an answer.
                    return
            else:
                self._astray.end(subject, f"the route of {subject} is known; its delayed messages are sent")
                self._server.arm_timer()

    def _look_later(self) -> None:
        asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._work.set)

    async def _find(self, subject: str) -> m.RouteReply:
        """Ask a meta server for the newest route."""
        found = await self._server.cluster.route(subject)
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
                    # A crash must not take back what another broker has: its number would be given to other rows.
                    await self._durable()
                    continue
                if not await self._sent(partition, waiting):
                    return
                self._stuck.end(str(partition.id), f"delayed messages of {name} are forwarded again")
        except PlaitError as error:
            # Whatever else is wrong meanwhile is one state: a broker that is away refuses, is silent or is not known.
            self._stuck.begin(
                str(partition.id), f"delayed messages of {name} cannot be forwarded yet: {error}", "waits"
            )
            self._look_later()
        except Exception:
            log.exception("delayed messages of %s were not forwarded; it is tried again", name)
            self._look_later()

    async def _sent(self, partition: Partition, waiting: WaitingForward) -> bool:
        """Send one frame; False: the rows that are left go another way."""
        forward = partition.row.forward
        assert forward is not None
        try:
            await self._store(forward.name, forward.group, bytes(waiting.frame.buffer))
        except (OutOfSequence, ProducerConflict, UnknownProducer) as error:
            log.warning("%s@%s takes delayed messages under a new producer id: %s", forward.name, forward.group, error)
            await self._take_back(partition)
            return False
        except (StaleRoute, Unavailable, Timeout) as error:
            found = await self._find(partition.row.subject)
            refused = isinstance(error, StaleRoute) and not self._forwards.fits(partition, waiting.frame)
            if refused or (forward.name, forward.group) not in found.partitions:
                await self._take_back(partition)
                return False
            # It is away, or does not know yet that it takes them.
            raise
        self._forwards.stored(partition, waiting.end)
        return True

    async def _take_back(self, partition: Partition) -> None:
        while not self._forwards.take_back(partition):
            # No faster than the disk takes it.
            await self._durable()

    async def _store(self, name: str, group: str, frame: bytes) -> None:
        """Have a frame stored by the partition of a broker group, this broker's own or another's."""
        if group == self._server.config.group:
            await self._store_here(name, frame)
            return
        addresses = self._addresses.get(group)
        if not addresses:
            raise Unavailable(f"where broker group {group} is has to be asked first")
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

        def reply() -> None:
            if not done.done():
                done.set_result(None)

        self._broker.answer_when_durable(reply)
        await done
