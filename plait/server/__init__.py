"""A broker behind sockets: connections, requests, timers and threads."""

from plait.server.broker_server import Server

__all__ = ["Server"]
