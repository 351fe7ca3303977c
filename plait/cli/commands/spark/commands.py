"""``plait spark``: jobs on data directories and archives (docs/archive.md, docs/audit.md, docs/history.md)."""

from __future__ import annotations

from cyclopts import App

app = App(name="spark", help="Archive and audit data directories, look up messages, send them again.")
app.command(
    "plait.cli.commands.spark.archive:archive",
    name="archive",
    help="Archive the logs of a data directory as Parquet files.",
)
app.command(
    "plait.cli.commands.spark.audit:audit", name="audit", help="Check in the logs whether every promise was kept."
)
app.command(
    "plait.cli.commands.spark.history:history", name="history", help="Find messages in an archive and the live log."
)
app.command(
    "plait.cli.commands.spark.replay:replay", name="replay", help="Send messages of an archive and the live log again."
)
app.command("plait.cli.commands.spark.prepare:prepare", name="prepare", help="Run once: makes Spark start faster.")
