"""Finds messages in a segment of the message log by key or by message id, without reading the segment.

Derived: an index can be rebuilt from its segment at any time. The broker builds and queries it, the doctor checks it.
It imports ``frame`` and ``storage.disk``.
"""
