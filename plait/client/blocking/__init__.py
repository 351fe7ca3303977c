"""The client for blocking code: the same calls without ``await``, run on an event loop in a background thread.

Exported as ``plait.sync``. May import every other part of the client; of those, only ``plait.client.send`` and
``plait.client.consume`` import its loop thread and its row handover.
"""
