"""Storage of delayed messages: buckets of rows by due time, and the rows that are not in a bucket yet.

The broker's schedule uses it. It imports ``storage.logs``, ``frame`` and ``model``.
"""
