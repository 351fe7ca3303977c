"""Stages: rows of a batch that are invisible until it is committed.

``Stages`` creates, expires and drops stages, and ``StagePublisher`` publishes them. The broker owns one of each; its
recovery fills ``Stages``, and the server's operations call both through the broker. This package may import the rest of
``broker``, ``frame`` and ``storage``, never ``server`` or ``client``.
"""
