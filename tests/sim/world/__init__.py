"""A simulated world: everything that Plait does, together, from one seed.

``plan`` draws what there is and what happens. ``senders``, ``members`` and ``readers`` are the users; ``machines`` and
``operator`` run the servers and change them. ``ledger`` records what happened to each message, ``judge`` finds what is
wrong with that, and ``world`` runs it all.
"""
