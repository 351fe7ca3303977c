"""The broker's decisions, as plain objects: no sockets, threads or clocks of their own.

``Broker`` is the whole; ``Attachments`` says who consumes, ``Retention`` what may go.
"""

from plait.broker.broker import Broker
from plait.broker.config import BrokerConfig
from plait.broker.groups.attachments import Attachments
from plait.broker.retention import Retention

__all__ = ["Attachments", "Broker", "BrokerConfig", "Retention"]
