"""Tools for tests.

For users:

- ``EmbeddedBroker`` runs a real broker inside a test. The pytest fixtures ``plait_broker`` and ``plait_async_broker``
  provide it.
- ``History`` records what happens to messages, and ``check`` finds the delivery promises that were not kept.

For Plait's own tests: ``sim`` simulates a disk, a network and a clock, with random faults from a seed.

This package may import every package except spark, doctor and the command line. No other package imports it.
"""

from typing import TYPE_CHECKING, Any

from plait.clock import ManualClock

if TYPE_CHECKING:
    from plait.testing.embedded_broker import BlockingBroker, EmbeddedBroker

__all__ = ["BlockingBroker", "EmbeddedBroker", "ManualClock"]


def __getattr__(name: str) -> Any:
    # Load the broker on demand, because pytest imports this package in every run, also without a broker.
    if name in __all__:
        from plait.testing import embedded_broker as embedded

        return getattr(embedded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
