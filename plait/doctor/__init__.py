"""Checks a data directory without changing it: checkpoints, logs, consume logs, buckets and the meta database.

``plait doctor`` calls ``examine`` and prints its report. A module per part of the directory; ``findings`` has the
report. May import storage, frame, model, broker and meta; not the server or the command line.
"""

from plait.doctor.examine import examine
from plait.doctor.findings import CheckReport, Finding

__all__ = ["CheckReport", "Finding", "examine"]
