"""A subject's history, from an archive and a live log: look-ups and replays.

``History`` is imported from here by users (docs/history.md).
"""

from plait.spark.history.lookup import History

__all__ = ["History"]
