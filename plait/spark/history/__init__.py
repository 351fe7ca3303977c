"""History: finds and replays messages of a subject in an archive and in the live log together.

Users import ``History`` from here (docs/history.md); the CLI commands for lookups and replays use it too. The package
may import ``archiving``, ``source``, ``runtime``, the client, storage and frame. A lookup needs neither Spark nor Java.
"""

from plait.spark.history.lookup import History

__all__ = ["History"]
