"""Connections and routes: a ``Node`` for each server, a ``Router`` for each client, the sessions of consumers, and the
health of broker groups.

Used by every other part of the client. May import ``plait.wire``, ``plait.model`` and the types of the client.
"""
