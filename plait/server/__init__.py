"""Servers: sockets, connections, requests, timers and threads around a broker or a meta server.

``Server`` (a broker) and ``plait.server.meta`` are used by the CLI and by ``plait.testing``. May import
``plait.broker``, ``plait.meta``, ``plait.wire``, ``plait.storage``, ``plait.frame`` and ``plait.model``.
"""

from plait.server.broker_server import Server

__all__ = ["Server"]
