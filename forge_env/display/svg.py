"""Line charts and share bars as SVG text that follows the page's light or dark theme through CSS variables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from forge_env.display.curves import COLOURS, Curve, colour_of, is_waiting
from forge_env.figures import number, percent

SERIES = ("#2a6fdb", "#b9560f", "#0f7a64", "#b03a75", "#7558c9", "#7a6b0e")
"""Colours of lines on white, dark enough for text."""
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 8, 24
LEAST_SHARE, ROOM_FOR_SHARE, ROOM_FOR_WORDS = 0.005, 0.06, 0.25
"""Minimum shares of a bar that are shown at all, that contain their percentage, and that contain their name."""


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
    curves: Sequence[Curve],
    *,
    width: int = 460,
    height: int = 190,
    bounds: tuple[float, float] | None = None,
    label: str = "",
    log: bool = False,
    hover: bool = True,
) -> str:
    """Draw curves over a common x axis of training steps.

    Points with a standard error get an error bar; the line between them is faint, since the values there are unknown.

    Args:
        bounds: fixed range of y, else the range of the data.
        label: text for screen readers.
        log: use a logarithmic y axis if every value is above 0.
        hover: embed the values, for the page to show under the pointer.
    """
    log = log and all(y > 0 for curve in curves for y in curve.y)
    scaled = math.log10 if log else float
    y_ticks = ticks(*(bounds or _range([scaled(y) for curve in curves for y in curve.y])))
    if log:
        y_ticks = [float(power) for power in range(math.floor(y_ticks[0]), math.ceil(y_ticks[-1]) + 1)]
    x_range = _range([x for curve in curves for x in curve.x])
    axes = _Axes(x_range, (y_ticks[0], y_ticks[-1]), width, height, log)
    parts = [*_grid(axes, y_ticks)]
    for index, curve in enumerate(curves):
        parts += _curve(curve, f"c{index % COLOURS}", axes)
    data = [
        {"label": curve.label, "x": curve.x, "y": [float(f"{y:.5g}") for y in curve.y], "e": curve.error}
        for curve in curves
    ]
    frame = {"x": [*x_range], "left": LEFT, "right": width - RIGHT, "top": TOP, "bottom": height - BOTTOM}
    embedded = escape(json.dumps({"curves": data, "frame": frame}), quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label, quote=True)}"'
        + (f' data-hover="{embedded}"' if hover else "")
        + f'>{"".join(parts)}<line class="cursor" y1="{TOP}" y2="{height - BOTTOM}"/></svg>'
    )


@dataclass(frozen=True, slots=True)
class _Axes:
    """Axes of a chart, which give the position of a value in the drawing."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    width: int
    height: int
    log: bool

    def x(self, value: float) -> float:
        """Distance from the left."""
        low, high = self.x_range
        return LEFT + (value - low) / ((high - low) or 1.0) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Distance from the top; values outside the range are drawn at its ends."""
        low, high = self.y_range
        share = (min(max(math.log10(value) if self.log else value, low), high) - low) / (high - low)
        return self.height - BOTTOM - share * (self.height - TOP - BOTTOM)


def _grid(axes: _Axes, y_ticks: Sequence[float]) -> Iterator[str]:
    """Horizontal lines with their values, and the steps on the x axis."""
    for value in [10.0**power for power in y_ticks] if axes.log else y_ticks:
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


def share_bars(accounts: Mapping[str, Mapping[str, float]]) -> str:
    """Draw a bar of stacked shares for every actor, work in colours and waiting hatched, with all shares listed below.

    An activity has the same colour in all bars, and no two activities of one bar share a colour (`colour_of`).
    """
    return f'<div class="account">{"".join(_share_bar(actor, account) for actor, account in accounts.items())}</div>'


def _share_bar(actor: str, account: Mapping[str, float]) -> str:
    shares = {what: share for what, share in account.items() if share >= LEAST_SHARE}
    work = sorted((what for what in shares if not is_waiting(actor, what)), key=lambda what: -shares[what])
    order = [*work, *sorted((what for what in shares if what not in work), key=lambda what: -shares[what])]
    pieces, words = [], []
    for what in order:
        kind = f"c{colour_of(what)}" if what in work else "waits"
        text = percent(shares[what])
        inside = f"{what} {text}" if shares[what] >= ROOM_FOR_WORDS else text if shares[what] >= ROOM_FOR_SHARE else ""
        title = escape(f"{what} {percent(shares[what])}", quote=True)
        width = f"{shares[what] * 100:.2f}%"
        pieces.append(f'<i class="{kind}" style="width:{width}" title="{title}"><span>{escape(inside)}</span></i>')
        words.append(f'<span class="key"><i class="{kind}"></i>{escape(what)} {text}</span>')
    return (
        f'<div class="who">{escape(actor)}</div><div><div class="shares">{"".join(pieces)}</div>'
        f'<div class="legend">{"".join(words)}</div></div>'
    )
