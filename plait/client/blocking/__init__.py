"""The client for blocking code: the same calls without ``await``, run on an event loop in a background thread.

Exported as ``plait.sync``. May import every other part of the client. Of these parts, only ``plait.client.send`` and
``plait.client.consume`` import modules of this package: its loop thread and its row handover.
"""
