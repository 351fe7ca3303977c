"""What tests need that a broker in production does not.

For everybody: ``EmbeddedBroker``, a real broker inside a test, also as the pytest fixtures ``plait_broker`` and
``plait_async_broker``. For Plait's own tests: disks that fail, from a seed.
"""

from typing import TYPE_CHECKING, Any

from plait.clock import ManualClock

if TYPE_CHECKING:
    from plait.testing.embedded_broker import BlockingBroker, EmbeddedBroker

__all__ = ["BlockingBroker", "EmbeddedBroker", "ManualClock"]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: pytest imports this package in every run, with or without a broker.
    if name in __all__:
        from plait.testing import embedded_broker as embedded

        return getattr(embedded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
