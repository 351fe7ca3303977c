"""Transactions: stores half messages, which are invisible, and publishes or deletes them when they are decided.

``Transactions`` stores, decides and publishes; ``TransactionTable`` is the derived state, ``CheckBacks`` asks producers
for the outcome of undecided transactions, and the server calls ``transaction_requests``. May import other broker
modules, ``frame``, ``model`` and ``storage``.
"""
