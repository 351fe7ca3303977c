"""A broker behind sockets: connections, requests, timers and threads."""

from plait.server.host import Server

__all__ = ["Server"]
