"""Members of groups: heartbeats, liveness, and the allocation of LPs to members.

Used by ``MetaService`` and, for liveness, by ``plait.meta.brokers``. May import ``plait.meta.core``,
``plait.meta.database`` and ``plait.model``.
"""
