"""A forked child is refused its parent's clients, and opens its own."""

from __future__ import annotations

import subprocess
import sys

from plait.testing import BlockingBroker

ASYNCHRONOUS = """
import asyncio, os, sys, plait

async def main(address):
    async with plait.connect(address) as client:
        await client.send("s", b"parent")
        async with client.consumer("s", group="g") as consumer:
            pid = os.fork()
            if pid == 0:
                asyncio.events._set_running_loop(None)
                os._exit(asyncio.run(child(client, consumer, address)))
            _, status = os.waitpid(pid, 0)
            bodies = [(await anext(consumer)).body for _ in range(2)]
            print(os.waitstatus_to_exitcode(status), bodies, (await client.send("s", b"")).sequence)

async def child(client, consumer, address):
    refused = 0
    uses = [lambda: client.send("s", b""), lambda: client.flush(), lambda: client.admin.subjects(),
            lambda: consumer.fetch(), lambda: client.send_many("s", [b""])]
    for use in uses:
        try:
            await use()
        except plait.ForkedClient:
            refused += 1
    for use in (lambda: client.post("s", b""), lambda: client.consumer("s", "g"), lambda: client.reader("s")):
        try:
            use()
        except plait.ForkedClient:
            refused += 1
    await client.close()
    async with plait.connect(address) as own:
        receipt = await own.send("s", b"child")
        different = receipt.message_id.producer != client._producer.id
    return refused if different else 99

asyncio.run(main(sys.argv[1]))
"""

BLOCKING = """
import os, sys, plait.sync

with plait.sync.connect(sys.argv[1]) as client:
    client.send("s", b"parent")
    ticket = client.post("s", b"posted")
    ticket.result()
    with client.consumer("s", group="g") as consumer, client.reader("s") as reader:
        pid = os.fork()
        if pid == 0:
            refused = 0
            for use in (lambda: client.send("s", b""), lambda: client.post("s", b""), lambda: client.flush(),
                        lambda: client.consumer("s", broadcast=True), lambda: consumer.fetch(), lambda: next(consumer),
                        lambda: reader.fetch(), lambda: client.admin.subjects()):
                try:
                    use()
                except plait.ForkedClient:
                    refused += 1
            assert ticket.result().sequence == 1
            consumer.close()
            reader.close()
            client.close()
            with plait.sync.connect(sys.argv[1]) as own:
                own.post("s", b"child").result(10)
            os._exit(refused)
        _, status = os.waitpid(pid, 0)
        bodies = [next(consumer).body for _ in range(3)]
        print(os.waitstatus_to_exitcode(status), bodies, client.send("s", b"").sequence)
"""


def run(program: str, address: str) -> str:
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", program, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_a_child_cannot_use_the_clients_of_its_parent_and_opens_its_own(plait_broker: BlockingBroker) -> None:
    assert run(ASYNCHRONOUS, plait_broker.address) == "8 [b'parent', b'child'] 2"


def test_a_child_cannot_use_the_blocking_clients_of_its_parent(plait_broker: BlockingBroker) -> None:
    assert run(BLOCKING, plait_broker.address) == "8 [b'parent', b'posted', b'child'] 3"
