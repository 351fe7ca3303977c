"""A meta server behind a socket: requests, notifications of waiting clients, and broker orders.

``MetaServer`` is used by the CLI; ``MetaHost`` and ``MetaHandlers`` also by a broker that has a meta server in its
process (``plait.server.cluster``). May import ``plait.meta``, ``plait.wire`` and the other rooms of ``plait.server``.
"""
