"""``plait spark``: jobs on the logs of a data directory and on archives of them. docs/archive.md tells users more."""

from __future__ import annotations

from cyclopts import App

app = App(name="spark", help="Archive data directories, and look messages up.")
app.command(
    "plait.cli.spark_archive:archive", name="archive", help="Archive the logs of a data directory as Parquet files."
)
app.command("plait.cli.spark_history:history", name="history", help="Find messages in an archive and the live log.")
