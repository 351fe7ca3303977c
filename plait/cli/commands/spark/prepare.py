"""``plait spark prepare``: makes Spark start faster; run once after installation."""

from __future__ import annotations

import time

from plait.cli.output import console


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
