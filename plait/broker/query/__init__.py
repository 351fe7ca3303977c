"""Finds messages by key, id, headers and time, from the indexes of the message log's segments.

The server's requests enter it with a partition; its background job keeps the indexes. It imports the broker's
partitions, ``filter`` and ``storage.index``.
"""
