"""The vocabulary that every part of Plait shares.

Names and their rules, partition ids, logical partitions (sets, runs, hashes), routes, settings, retry policies and
failure reasons, one definition each, without I/O. Every other package uses it; it imports only ``errors``, ``limits``
and ``version``.
"""
