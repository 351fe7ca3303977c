"""Connections and routes: a ``Node`` for each server, a ``Router`` for each client, and the sessions of consumers.

Used by every other part of the client. May import ``plait.wire``, ``plait.model`` and the types of the client.
"""
