"""The wire protocol: packets (``packets``), the messages in them (``messages``) and a client connection (``link``).

The server and the client use this package. It may import the base modules, ``model`` and ``frame``. ``packets`` parses
bytes and ``messages`` defines structs, both without I/O; ``link`` connects to a server with asyncio.
"""
