"""A simulated world: everything that Plait does, together, from one seed.

``plan`` chooses at random what the world has and what happens in it. ``senders``, ``members`` and ``readers`` are the
users. ``machines`` runs the servers, and ``operator`` changes them. ``ledger`` records what happens to each message,
``judge`` finds broken promises in the ledger, and ``world`` runs everything.
"""
