"""The vocabulary that every part of Plait shares.

It defines names and their rules, partition ids, logical partitions (sets, runs, hashes), routes, settings, retry
policies and failure reasons. It does no I/O. Every other package may import it. It imports only ``errors``, ``limits``
and ``version``.
"""
