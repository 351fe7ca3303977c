"""``plait.App``: runs handler functions as a service, with signals, draining, retries and hooks.

Users import it through ``plait``; nothing else in Plait uses it. The package may import the other parts of
``plait.client`` and ``plait.model``; no server code.
"""
