"""A dead letter: it is listed with its reason, the handler is fixed, and the letter is resent and handled."""

from __future__ import annotations

import asyncio

import plait
from examples.demo.failing import without_tracebacks
from examples.demo.processes import DemoFailed

SUBJECT = "order.invoice"
GROUP = "invoices"
RETRY = plait.Retry.constant(0.02, attempts=3)
PATIENCE_SECONDS = 30.0
#: The second order cannot be handled.
AMOUNTS: tuple[int | str, ...] = (3, "five", 7)


async def show_dead_letter(address: str) -> plait.DeadLetter:
    """Send orders, one of which the handler cannot handle until it is fixed. Returns the dead letter."""
    app = plait.App(address, group=GROUP)
    handled: dict[bytes, int] = {}
    mended = False
    changed = asyncio.Event()

    @app.subscriber(SUBJECT, retry=RETRY)
    async def invoice(message: plait.Message) -> None:
        if message.headers["amount"] == "five" and not mended:
            raise ValueError("amount 'five' is not a number")
        handled[message.body] = message.attempt
        changed.set()

    async def until(what: str, count: int) -> None:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(handled) < count:
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            raise DemoFailed(f"dead letters: {what} was not handled within {PATIENCE_SECONDS:g} s") from None

    async def work() -> plait.DeadLetter:
        nonlocal mended
        async with plait.connect(address) as client:
            for number, amount in enumerate(AMOUNTS):
                await client.send(SUBJECT, b"order %d" % number, headers={"amount": amount})
            await until("the other orders", 2)
            letter = await _only(client)
            mended = True
            await client.admin.resend_dead(SUBJECT, GROUP, type=letter.reason.type)
            await until("the resent letter", 3)
            return letter

    with without_tracebacks():
        running = asyncio.ensure_future(app.run())
        try:
            letter = await work()
        finally:
            app.stop()
            await running
    if (letter.attempts, handled[b"order 1"]) != (RETRY.attempts, letter.attempts + 1):
        raise DemoFailed(f"dead letters: {letter} was handled on attempt {handled[b'order 1']}")
    return letter


async def _only(client: plait.Client) -> plait.DeadLetter:
    """Wait for the only dead letter."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            letters = await client.admin.dead_letters(SUBJECT, GROUP)
            if letters:
                break
            await asyncio.sleep(RETRY.steps[0])
    if len(letters) != 1:
        raise DemoFailed(f"{len(letters)} dead letters; expected one")
    return letters[0]
