"""``plait spark``: jobs on the logs of a data directory and on archives of them.

docs/archive.md and docs/history.md tell users more.
"""

from __future__ import annotations

from cyclopts import App

app = App(name="spark", help="Archive data directories, audit them, look messages up, send them again.")
app.command(
    "plait.cli.commands.spark.archive:archive",
    name="archive",
    help="Archive the logs of a data directory as Parquet files.",
)
app.command(
    "plait.cli.commands.spark.audit:audit", name="audit", help="Judge from the logs whether every promise was kept."
)
app.command(
    "plait.cli.commands.spark.history:history", name="history", help="Find messages in an archive and the live log."
)
app.command(
    "plait.cli.commands.spark.replay:replay", name="replay", help="Send messages of an archive and the live log again."
)
app.command("plait.cli.commands.spark.prepare:prepare", name="prepare", help="Once: make Spark start faster.")
