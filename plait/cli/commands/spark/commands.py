"""``plait spark``: jobs on data directories and archives (docs/archive.md, docs/audit.md, docs/history.md)."""

from __future__ import annotations

import time

from cyclopts import App

from plait.cli.output import console

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


@app.command(help="Run once: makes Spark start faster.")
def prepare() -> None:
    """Let Java store the classes that Spark loads: later commands start in about half the time."""
    from plait.spark.runtime import warmup

    begun = time.monotonic()
    with console().status("running Spark once, so that Java stores the classes it loads (a minute or two)"):
        archive = warmup.prepare()
    size = archive.stat().st_size / 1_000_000
    console().print(
        f"Spark is prepared: {size:.0f} MB in {archive.parent}, {time.monotonic() - begun:.1f} s", soft_wrap=True
    )
