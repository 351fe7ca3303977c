"""Transactions of a client: sends half messages, decides, and answers the brokers' checks.

Used by the client and its admin. May import ``plait.client.net``, ``plait.client.send``, ``plait.frame``,
``plait.model`` and ``plait.wire``.
"""
