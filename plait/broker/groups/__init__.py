"""Consumer groups of a broker: attachments, deliveries, locks and leases, failures, retries and dead letters.

Each group decides which consumer gets which rows and records every decision as an event of the action log. The broker,
its recovery and the server's request handlers use this package. It may import ``frame``,
``model``, ``storage`` and the rest of ``broker``, never ``server`` or ``client``.
"""
