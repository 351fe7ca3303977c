"""The decisions of a meta server: routes, allocations, liveness of brokers and members, and batch commits.

``MetaService`` in ``service.py`` is the entry; ``plait.server.meta`` runs it in a thread. Nothing here uses sockets or
reads a clock of its own. May import ``plait.model``, ``plait.clock``, ``plait.errors`` and ``plait.limits``.
"""
