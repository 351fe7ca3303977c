"""Checks the indexes of the message log: every block of each file, and that the file belongs to its segment."""

from __future__ import annotations

from plait.doctor.findings import CheckReport
from plait.errors import DamageError
from plait.storage.disk import RealDisk
from plait.storage.index.index_file import DIRECTORY, DRAFT, IndexFile, base_of, index_path
from plait.storage.logs.segment import segment_name

PART = "index"


def examine_indexes(disk: RealDisk, directory: str, report: CheckReport) -> None:
    """Check all index files against the segments in ``directory``."""
    for name in disk.list(DIRECTORY):
        base = base_of(name)
        if base is None:
            if not name.endswith(DRAFT):
                advice = "nothing: the next start removes it"
                report.add("note", PART, f"{DIRECTORY}/{name}", "is not an index", "none", advice)
            continue
        what = _problem(disk, directory, base)
        if what:
            harm = "no message is lost; queries read this part of the log until it is indexed again"
            advice = "nothing: the server builds it again when a query needs it"
            report.add("note", PART, index_path(base), what, harm, advice)


def _problem(disk: RealDisk, directory: str, base: int) -> str:
    """What is wrong with an index; empty: nothing."""
    path = f"{directory}/{segment_name(base)}"
    try:
        index = IndexFile(disk, base)
        index.verify()
    except (DamageError, OSError) as error:
        return str(error)
    if not disk.exists(path):
        return "its segment is gone"
    file = disk.open(path)
    try:
        view = file.view()
        if index.facts.end - base > len(view) or not index.matches(view, base, index.facts.end):
            return "belongs to other content of its segment"
    finally:
        file.close()
    return ""
