"""Line charts and share bars as SVG text that follows the page's light or dark theme through CSS variables."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape

from forge_env.display.curves import Curve

COLOURS = 6
"""Classes `c0` to `c5` that the page's style defines."""
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 8, 24


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that cover `low` to `high`."""
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-300):  # one value, but for rounding
        high = low + max(abs(low), 1e-3)
    raw = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def number(value: float) -> str:
    """A short label: 1.2M, 34k, 0.25, 1e-06."""
    size = abs(value)
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / {'G': 1e9, 'M': 1e6, 'k': 1e3}[suffix]:.3g}{suffix}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


def line_chart(
    curves: Sequence[Curve],
    *,
    width: int = 460,
    height: int = 190,
    bounds: tuple[float, float] | None = None,
    label: str = "",
) -> str:
    """The curves over a common x axis of training steps, with bands of one standard error where known.

    Args:
        curves: at least one with at least one point.
        width: of the drawing, in its own units; it scales with the page.
        height: of the drawing.
        bounds: fixed range of y, else the data's.
        label: text for screen readers.
    """
    x_low, x_high = _range([x for curve in curves for x in curve.x])
    y_ticks = ticks(*(bounds or _range([y for curve in curves for y in curve.y])))
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def px(x: float) -> float:
        return LEFT + (x - x_low) / ((x_high - x_low) or 1.0) * (width - LEFT - RIGHT)

    def py(y: float) -> float:
        share = (min(max(y, y_low), y_high) - y_low) / (y_high - y_low)
        return height - BOTTOM - share * (height - TOP - BOTTOM)

    parts = []
    for y in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{py(y):.1f}" y2="{py(y):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{py(y) + 3.5:.1f}" text-anchor="end">{number(y)}</text>')
    parts += [
        f'<text class="tick" x="{px(x):.1f}" y="{height - 7}" text-anchor="middle">{number(x)}</text>'
        for x in ticks(x_low, x_high, 6)
        if x_low <= x <= x_high and x == round(x)
    ]
    for index, curve in enumerate(curves):
        colour = f"c{index % COLOURS}"
        if any(curve.error):
            edge = [f"{px(x):.1f},{py(y + e):.1f}" for x, y, e in zip(curve.x, curve.y, curve.error, strict=True)]
            back = [f"{px(x):.1f},{py(y - e):.1f}" for x, y, e in zip(curve.x, curve.y, curve.error, strict=True)]
            parts.append(f'<polygon class="band {colour}" points="{" ".join([*edge, *reversed(back)])}"/>')
        points = [(px(x), py(y)) for x, y in zip(curve.x, curve.y, strict=True)]
        parts.append(f'<polyline class="line {colour}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
        if len(points) <= 40:
            parts += [f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in points]
    data = [{"label": curve.label, "x": curve.x, "y": curve.y} for curve in curves]
    frame = {"x": [x_low, x_high], "left": LEFT, "right": width - RIGHT, "top": TOP, "bottom": height - BOTTOM}
    hover = escape(json.dumps({"curves": data, "frame": frame}), quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label, quote=True)}" '
        f'data-hover="{hover}">{"".join(parts)}<line class="cursor" y1="{TOP}" y2="{height - BOTTOM}"/></svg>'
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0))


def legend(labels: Sequence[str]) -> str:
    """Colour keys, in the order of the curves."""
    keys = (f'<span class="key"><i class="c{i % COLOURS}"></i>{escape(text)}</span>' for i, text in enumerate(labels))
    return f'<div class="legend">{"".join(keys)}</div>'


def share_bars(accounts: Mapping[str, Mapping[str, float]]) -> str:
    """One bar of stacked shares for every actor; activities keep their colour across bars."""
    activities = list(dict.fromkeys(what for account in accounts.values() for what in account))
    rows = []
    for actor, account in accounts.items():
        pieces = "".join(
            f'<i class="c{activities.index(what) % COLOURS}" style="width:{share * 100:.2f}%" '
            f'title="{escape(what, quote=True)} {share:.1%}"></i>'
            for what, share in account.items()
        )
        rows.append(f'<div class="who">{escape(actor)}</div><div class="shares">{pieces}</div>')
    return f'{legend(activities)}<div class="account">{"".join(rows)}</div>'
