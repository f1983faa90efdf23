"""Line charts and share bars as SVG text that follows the page's light or dark theme through CSS variables."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape

from forge_env.display.curves import COLOURS, Curve, colour_of, is_waiting
from forge_env.figures import number

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
        curves: at least one with at least one point.
        width: of the drawing, in SVG units; it scales with the page.
        height: of the drawing.
        bounds: fixed range of y, else the range of the data.
        label: text for screen readers.
        log: use a logarithmic y axis if every value is above 0.
        hover: embed the values, for the page to show under the pointer.
    """
    log = log and all(y > 0 for curve in curves for y in curve.y)
    x_low, x_high = _range([x for curve in curves for x in curve.x])
    scaled = math.log10 if log else float
    y_ticks = ticks(*(bounds or _range([scaled(y) for curve in curves for y in curve.y])))
    if log:
        y_ticks = [float(power) for power in range(math.floor(y_ticks[0]), math.ceil(y_ticks[-1]) + 1)]
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def px(x: float) -> float:
        return LEFT + (x - x_low) / ((x_high - x_low) or 1.0) * (width - LEFT - RIGHT)

    def py(y: float) -> float:
        share = (min(max(scaled(y), y_low), y_high) - y_low) / (y_high - y_low)
        return height - BOTTOM - share * (height - TOP - BOTTOM)

    parts = []
    for y in [10.0**power for power in y_ticks] if log else y_ticks:
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
            parts += [
                f'<line class="line error {colour}" x1="{px(x):.1f}" x2="{px(x):.1f}" '
                f'y1="{py(y + e):.1f}" y2="{py(y - e):.1f}"/>'
                for x, y, e in zip(curve.x, curve.y, curve.error, strict=True)
            ]
        points = [(px(x), py(y)) for x, y in zip(curve.x, curve.y, strict=True)]
        faint = ' opacity=".35"' if any(curve.error) else ""
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="line {colour}"{faint} points="{drawn}"/>')
        if len(points) <= 40:
            parts += [f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in points]
    data = [
        {"label": curve.label, "x": curve.x, "y": [float(f"{y:.5g}") for y in curve.y], "e": curve.error}
        for curve in curves
    ]
    frame = {"x": [x_low, x_high], "left": LEFT, "right": width - RIGHT, "top": TOP, "bottom": height - BOTTOM}
    embedded = escape(json.dumps({"curves": data, "frame": frame}), quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label, quote=True)}"'
        + (f' data-hover="{embedded}"' if hover else "")
        + f'>{"".join(parts)}<line class="cursor" y1="{TOP}" y2="{height - BOTTOM}"/></svg>'
    )


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
        text = f"{shares[what]:.0%}"
        inside = f"{what} {text}" if shares[what] >= ROOM_FOR_WORDS else text if shares[what] >= ROOM_FOR_SHARE else ""
        title = escape(f"{what} {shares[what]:.1%}", quote=True)
        width = f"{shares[what] * 100:.2f}%"
        pieces.append(f'<i class="{kind}" style="width:{width}" title="{title}"><span>{escape(inside)}</span></i>')
        words.append(f'<span class="key"><i class="{kind}"></i>{escape(what)} {text}</span>')
    return (
        f'<div class="who">{escape(actor)}</div><div><div class="shares">{"".join(pieces)}</div>'
        f'<div class="legend">{"".join(words)}</div></div>'
    )
