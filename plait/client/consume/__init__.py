"""The consuming side of a client: pulls rows from a subject's partitions, hands them to the user, reports outcomes.

``consumer.py`` is the shared consumer; ``ordered/`` adds locks, leases and order per key. ``plait.client.client``,
``plait.client.app`` and ``plait.client.blocking`` use this package. It may import the other parts of ``plait.client``
except ``app`` and ``admin``, and ``plait.wire``, ``plait.frame`` and ``plait.model``; no server code.
"""
