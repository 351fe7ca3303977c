"""The wire: packets and what is in them, without I/O, and dialling a server."""
