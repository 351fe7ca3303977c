"""``plait spark``: jobs on the logs of a data directory and on archives of them. docs/archive.md tells users more."""

from __future__ import annotations

from cyclopts import App

app = App(name="spark", help="Archive a data directory.")
app.command(
    "plait.cli.spark_archive:archive", name="archive", help="Archive the logs of a data directory as Parquet files."
)
