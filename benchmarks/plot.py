"""A bar chart of the figures, each divided by its bar."""

from __future__ import annotations

from pathlib import Path

from benchmarks.result import Result


def plot(results: list[Result], path: Path) -> None:
    """A value of 1 or more is met, for upper and lower bars alike."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    scores = [r.bar / r.figure if r.at_most and r.figure else r.figure / r.bar for r in results]
    figure, axes = plt.subplots(figsize=(9, 0.4 * len(results) + 1.2))
    colours = ["#2a7f62" if result.met else "#b3402a" for result in results]
    axes.barh([result.name for result in results], scores, color=colours)
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("figure / bar (1 = the bar is just met)")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
