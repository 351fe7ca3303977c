"""pytest fixtures with a real broker. They are installed with Plait and need no import."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from plait.testing.embedded_broker import BlockingBroker, EmbeddedBroker


@pytest.fixture
def plait_broker(tmp_path: Path) -> Iterator[BlockingBroker]:
    """A new broker for the test, in a thread: connect to ``plait_broker.address``, blocking or asynchronously."""
    from plait.testing.embedded_broker import EmbeddedBroker

    with EmbeddedBroker(tmp_path / "plait") as broker:
        yield broker


try:
    import pytest_asyncio
except ImportError:
    pass
else:

    @pytest_asyncio.fixture
    async def plait_async_broker(tmp_path: Path) -> AsyncIterator[EmbeddedBroker]:
        """A new broker for the test, on the test's loop: ``await plait_async_broker.restart()``."""
        from plait.testing.embedded_broker import EmbeddedBroker

        async with EmbeddedBroker(tmp_path / "plait") as broker:
            yield broker
