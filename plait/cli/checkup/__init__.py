"""A check-up of a data directory that changes nothing: what ``plait doctor`` looks at."""

from plait.cli.checkup.examine import examine
from plait.cli.checkup.findings import Finding, Report

__all__ = ["Finding", "Report", "examine"]
