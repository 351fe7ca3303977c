"""The wire protocol, which clients and servers use.

``messages`` defines the messages as structs, ``codec`` encodes and decodes them, and ``link`` has the packets and a
client's connection to a server. Only ``Link`` does I/O. This package may import the base modules, ``model`` and
``frame``.
"""
