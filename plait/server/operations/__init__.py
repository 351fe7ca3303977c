"""Management requests of a broker: subjects, groups, dead letters, parked keys, delayed messages, spans and stages.

``table.run`` finds the function of a request and calls it; ``plait.server.requests`` and ``plait.server.cluster`` use
it. This package may import ``plait.server.broker_host``, ``plait.broker``, ``plait.wire``, ``plait.storage``,
``plait.frame`` and ``plait.model``, not the rest of ``plait.server``.
"""
