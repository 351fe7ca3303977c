"""Ordered consumers and consumers with affinity: their locks, leases and buffers.

The meta server allocates LPs to members (``member_heartbeats.py``), brokers grant the locks (``ordered_pull.py``,
``wanted_locks.py``), a thread renews the leases (``lease_renewer.py``), and the buffer hands out each key in order
(``ordered_buffer.py``). ``OrderedFetcher`` joins them for a consumer.
This package may import what ``plait.client.consume`` may.
"""
