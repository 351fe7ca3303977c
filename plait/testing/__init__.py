"""Tools for tests.

For users: ``EmbeddedBroker``, a real broker inside a test, also as the pytest fixtures ``plait_broker`` and
``plait_async_broker``; ``History`` and ``check``, a recorder and a checker of delivery promises. For Plait's own tests:
a simulated disk, network and clock, from a seed (``sim``). May import every package but spark, doctor and the command
line; no other package imports this one.
"""

from typing import TYPE_CHECKING, Any

from plait.clock import ManualClock

if TYPE_CHECKING:
    from plait.testing.embedded_broker import BlockingBroker, EmbeddedBroker

__all__ = ["BlockingBroker", "EmbeddedBroker", "ManualClock"]


def __getattr__(name: str) -> Any:
    # Loaded on demand: pytest imports this package in every run, with or without a broker.
    if name in __all__:
        from plait.testing import embedded_broker as embedded

        return getattr(embedded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
