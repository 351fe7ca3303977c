"""The wire protocol: ``messages`` defines structs, ``codec`` makes bytes of them, ``packets`` makes packets of those.

The server and the client use this package. It may import the base modules, ``model`` and ``frame``. Only ``link``, a
connection to a server, does I/O.
"""
