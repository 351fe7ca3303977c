"""Spark for Plait: sessions with ``format("plait")``, the archiver, the audit and the history of a subject.

Users call `session`, `register`, `prepare`, `archive` and `audit`; the CLI calls the same functions. The packages are
``inputs`` (what jobs read), ``source``, ``sink``, ``archiving``, ``auditing``, ``history`` and ``runtime``. They may
import the client, storage, frame and model packages, and nothing of the broker, the meta server or the CLI. Running a
job needs ``pip install "plait[spark]"``; importing this package does not.
"""

from plait.spark.archiving.archiver import ArchiveReport, archive
from plait.spark.auditing.job import audit
from plait.spark.runtime.java import SparkUnavailable
from plait.spark.runtime.session import register, session
from plait.spark.runtime.warmup import prepare

__all__ = ["ArchiveReport", "SparkUnavailable", "archive", "audit", "prepare", "register", "session"]
