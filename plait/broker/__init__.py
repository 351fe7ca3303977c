"""The broker: stores messages and decides what consumers get, as plain objects without sockets, threads or clocks.

``Broker`` is the entry point, ``Attachments`` attaches and detaches consumers, ``Retention`` deletes expired data. The
server, the doctor and the testing tools use this package. It may import the base modules, ``model``, ``frame`` and
``storage``; it reaches disk and time only through objects that its caller passes in.
"""

from plait.broker.broker import Broker
from plait.broker.config import BrokerConfig
from plait.broker.groups.attachments import Attachments
from plait.broker.retention import Retention

__all__ = ["Attachments", "Broker", "BrokerConfig", "Retention"]
