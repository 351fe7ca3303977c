"""A broker's side of the cluster: registration, broker orders, and forwards of delayed rows.

Used by ``Server`` and by ``plait.server.meta`` (``broker_orders``). May import ``plait.broker``, ``plait.meta.views``,
``plait.wire`` and the other packages of ``plait.server``.
"""
