"""Writes the rows of a batch to stages, and commits or aborts the batch (R23).

Used by the Spark sink. May import ``plait.client.net``, ``plait.client.send``, the client, ``plait.frame`` and
``plait.wire``.
"""
