"""Plots as inline SVG, without scripts, fonts or images from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

WIDTH: Final = 720
HEIGHT: Final = 200
_LEFT: Final = 70
_RIGHT: Final = 12
_TOP: Final = 12
_BOTTOM: Final = 26
_BAR: Final = 20
#: Labels of bars longer than this are cut.
_LABEL_MAX: Final = 28


def format_count(value: float) -> str:
    """A number with a unit prefix, short enough for an axis."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def line_plot(times: Sequence[int], values: Sequence[int], title: str) -> str:
    """Values over time (microseconds since 1970), as a filled line."""
    if len(times) < 2:
        return ""
    top = max(*values, 1)
    low, high = times[0], times[-1]
    inner_width, inner_height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def x(time: int) -> float:
        return _LEFT + (time - low) / (high - low or 1) * inner_width

    def y(value: float) -> float:
        return _TOP + (1 - value / top) * inner_height

    points = " ".join(f"{x(time):.1f},{y(value):.1f}" for time, value in zip(times, values, strict=True))
    base = f"{y(0):.1f}"
    parts = [_opened(HEIGHT, title)]
    for share in (0.0, 0.5, 1.0):
        at = y(top * share)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(_LEFT - 6, at + 4, format_count(top * share), "end"))
    for time, anchor in ((low, "start"), (high, "end")):
        parts.append(_text(x(time), HEIGHT - 6, _format_time(time), anchor))
    parts.append(f'<polygon class="area" points="{x(low):.1f},{base} {points} {x(high):.1f},{base}"/>')
    parts.append(f'<polyline class="line" points="{points}"/></svg>')
    return "".join(parts)


def bar_plot(bars: Sequence[tuple[str, float]], title: str, label: Callable[[float], str] = format_count) -> str:
    """Named values as horizontal bars."""
    if not bars:
        return ""
    left = 210
    top = max(value for _, value in bars) or 1
    height = _BAR * len(bars) + 8
    parts = [_opened(height, title)]
    for number, (name, value) in enumerate(bars):
        y = 4 + number * _BAR
        width = value / top * (WIDTH - left - 90)
        shown = name if len(name) <= _LABEL_MAX else name[: _LABEL_MAX - 1] + "…"
        parts.append(_text(left - 8, y + 14, shown, "end"))
        parts.append(f'<rect class="bar" x="{left}" y="{y + 2}" width="{max(width, 1):.1f}" height="{_BAR - 5}"/>')
        parts.append(_text(left + width + 6, y + 14, label(value), "start"))
    parts.append("</svg>")
    return "".join(parts)


def _opened(height: int, title: str) -> str:
    shown = html.escape(title)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{shown}"><title>{shown}</title>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _format_time(micros: int) -> str:
    return datetime.fromtimestamp(micros / 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
