"""Partitions of a broker: reading their frames, opening, sealing and dropping logical partitions.

The broker, its groups and the server's request handlers use this package. It may import ``frame``, ``model``,
``storage`` and the rest of ``broker``, never ``server`` or ``client``.
"""
