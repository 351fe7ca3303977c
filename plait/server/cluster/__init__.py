"""A broker's side of the cluster: registration, broker orders, and forwards of delayed rows.

Used by ``Server`` and by ``plait.server.meta`` (``links``). May import ``plait.broker``, ``plait.meta``, ``plait.wire``
and the other packages of ``plait.server``.
"""
