"""Sends messages: turns rows into frames, chooses partitions, resends after a lost connection, and returns receipts.

``Senders`` has a ``SubjectSender`` for each subject, and a ``SubjectSender`` has a ``PartitionSender`` for each
partition. Used by the client, the blocking client, the app, staged batches and Spark. May import ``plait.client.net``,
the types of the client, ``plait.frame``, ``plait.wire`` and ``plait.model``.
"""
