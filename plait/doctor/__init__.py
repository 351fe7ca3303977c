"""A check-up of a data directory that changes nothing: what ``plait doctor`` looks at."""

from plait.doctor.examine import examine
from plait.doctor.findings import CheckReport, Finding

__all__ = ["CheckReport", "Finding", "examine"]
