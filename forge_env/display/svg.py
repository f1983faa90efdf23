"""Line charts as SVG text; the page's style colours them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from forge_env.display.curves import COLOURS, Curve
from forge_env.figures import number

SERIES = ("#2a6fdb", "#b9560f", "#0f7a64", "#b03a75", "#7558c9", "#7a6b0e")
"""Colours of lines on white, dark enough for text."""
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 8, 24


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers that cover `low` to `high`."""
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-300):  # a single value, apart from rounding
        high = low + max(abs(low), 1e-3)
    raw = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def line_chart(
    curves: Sequence[Curve], width: int, height: int, bounds: tuple[float, float] | None = None, label: str = ""
) -> str:
    """Draw curves over a common x axis of training steps; see `drawing`.

    Args:
        label: text for screen readers.
    """
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label, quote=True)}">'
        f"{drawing(curves, width, height, bounds)}</svg>"
    )


def drawing(curves: Sequence[Curve], width: int, height: int, bounds: tuple[float, float] | None = None) -> str:
    """Draw curves as the content of an SVG element.

    Points with a standard error get an error bar; the line between them is faint, since the values there are unknown.

    Args:
        bounds: range of y; by default, the range of the data.
    """
    y_ticks = ticks(*(bounds or _range([y for curve in curves for y in curve.y])))
    x_range = _range([x for curve in curves for x in curve.x])
    axes = _Axes(x_range, (y_ticks[0], y_ticks[-1]), width, height)
    lines = (part for index, curve in enumerate(curves) for part in _curve(curve, f"c{index % COLOURS}", axes))
    return "".join([*_grid(axes, y_ticks), *lines])


@dataclass(frozen=True, slots=True)
class _Axes:
    """Axes of a chart, which give the position of a value in the drawing."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    width: int
    height: int

    def x(self, value: float) -> float:
        """Distance from the left."""
        low, high = self.x_range
        return LEFT + (value - low) / ((high - low) or 1.0) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Distance from the top; values outside the range are drawn at its ends."""
        low, high = self.y_range
        share = (min(max(value, low), high) - low) / (high - low)
        return self.height - BOTTOM - share * (self.height - TOP - BOTTOM)


def _grid(axes: _Axes, y_ticks: Sequence[float]) -> Iterator[str]:
    """Horizontal lines with their values, and the steps on the x axis."""
    for value in y_ticks:
        y = axes.y(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{axes.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{number(value)}</text>'
    low, high = axes.x_range
    for x in ticks(low, high, 6):
        if low <= x <= high and x == round(x):
            yield (
                f'<text class="tick" x="{axes.x(x):.1f}" y="{axes.height - 7}" text-anchor="middle">{number(x)}</text>'
            )


def _curve(curve: Curve, colour: str, axes: _Axes) -> Iterator[str]:
    """Error bars, the line, and dots if there are few."""
    if any(curve.error):
        for x, y, error in zip(curve.x, curve.y, curve.error, strict=True):
            at = f"{axes.x(x):.1f}"
            ends = f'y1="{axes.y(y + error):.1f}" y2="{axes.y(y - error):.1f}"'
            yield f'<line class="line error {colour}" x1="{at}" x2="{at}" {ends}/>'
    points = [(f"{axes.x(x):.1f}", f"{axes.y(y):.1f}") for x, y in zip(curve.x, curve.y, strict=True)]
    faint = ' opacity=".35"' if any(curve.error) else ""
    yield f'<polyline class="line {colour}"{faint} points="{" ".join(map(",".join, points))}"/>'
    if len(points) <= 40:
        for left, top in points:
            yield f'<circle class="dot {colour}" cx="{left}" cy="{top}" r="2.5"/>'


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0))


def legend(labels: Sequence[str]) -> str:
    """Return colour keys, in the order of the curves."""
    keys = (f'<span class="key"><i class="c{i % COLOURS}"></i>{escape(text)}</span>' for i, text in enumerate(labels))
    return f'<div class="legend">{"".join(keys)}</div>'
