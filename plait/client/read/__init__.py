"""Reads subjects without a group: messages one by one (``Reader``) or whole ranges of a partition (``RangeScan``).

Used by the client, the command line and Spark inputs. May import ``plait.client.net``, ``plait.client.consume`` (for
the frames of a delivery), ``plait.frame`` and ``plait.wire``.
"""
