"""Management requests of a broker: subjects, groups, dead letters, parked keys, delayed messages, spans and stages.

Used by ``plait.server.requests`` and ``plait.server.cluster``.
"""
