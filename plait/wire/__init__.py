"""The wire protocol, which clients and servers use.

``messages`` defines the messages as structs, ``codec`` encodes and decodes them, ``packets`` splits received bytes into
packets, and ``link`` is a client's connection to a server. Only ``link`` does I/O. This package may import the base
modules, ``model`` and ``frame``.
"""
