"""``plait spark``: jobs on the logs of a data directory and on archives of them. docs/archive.md tells users more."""

from __future__ import annotations

from cyclopts import App

app = App(name="spark", help="Archive a data directory; audit it or its archive.")
app.command(
    "plait.cli.spark_archive:archive", name="archive", help="Archive the logs of a data directory as Parquet files."
)
app.command("plait.cli.spark_audit:audit", name="audit", help="Judge from the logs whether every promise was kept.")
