"""A meta server that listens on a socket: requests, notifications of waiting clients, and broker orders.

The CLI uses ``MetaServer``. A broker that has a meta server in its process uses ``MetaHost`` and ``MetaHandlers``
(``plait.server.cluster``). May import ``plait.meta``, ``plait.wire`` and the other packages of ``plait.server``.
"""
