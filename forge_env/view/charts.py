"""The charts of a run: their curves, as data for the page, as SVG and as CSV."""

from __future__ import annotations

import csv
import io
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from forge_env.display.curves import (
    COLOURS,
    PANELS,
    TIME_PREFIX,
    Curve,
    Panel,
    curve,
    reward_curves,
)
from forge_env.display.svg import SERIES, drawing
from forge_env.run.metrics import REWARD
from forge_env.run.trained import Trained
from forge_env.view.text import plain

MOST_POINTS = 1_000
"""Maximum points per line on a page; longer lines keep each bin's extremes."""
ALMOST = 1e-12

REWARD_PANEL = "reward"


@dataclass(slots=True)
class Chart:
    """One chart: its lines, and how to show them."""

    key: str
    title: str
    unit: str
    curves: list[Curve] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    """Index of the run of each line, if there are several runs."""
    known: bool = True
    """Whether it is one of the standard charts."""
    strip: bool = False
    """Whether it has a histogram for each step: a line is a bin, the lowest first; values are shares of the step."""

    @property
    def constant(self) -> bool:
        """Whether no line in it changes."""
        return all(max(line.y) - min(line.y) <= ALMOST * max(1.0, abs(line.y[0])) for line in self.curves if line.y)

    def data(self) -> dict[str, Any]:
        """Return the chart's data for the page."""
        lines = []
        for index, line in enumerate(self.curves):
            thin = line if self.strip else thinned(line)
            lines.append(
                {
                    "label": line.label,
                    "colour": self.runs[index] if self.runs else index,
                    "dash": self.runs[:index].count(self.runs[index]) if self.runs else int(any(thin.error)),
                    "x": thin.x,
                    "y": [_short(y) for y in thin.y],
                    "e": [_short(e) for e in thin.error] if any(thin.error) else [],
                    "points": len(thin.x) <= 40,
                }
            )
        return {
            "key": self.key,
            "title": self.title,
            "unit": self.unit,
            "lines": lines,
            "constant": self.constant,
            "known": self.known,
            "strip": self.strip,
        }


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def thinned(line: Curve) -> Curve:
    """Thin a line to at most `MOST_POINTS` points: the lowest and the highest of each bin, and both ends."""
    number = len(line.x)
    if number <= MOST_POINTS:
        return line
    keep = {0, number - 1}
    stretches = MOST_POINTS // 2 - 1
    for stretch in range(stretches):
        inside = range(stretch * number // stretches, (stretch + 1) * number // stretches)
        if inside:
            keep.add(min(inside, key=lambda place: line.y[place]))
            keep.add(max(inside, key=lambda place: line.y[place]))
    indices = sorted(keep)
    errors = [line.error[place] for place in indices] if line.error else []
    return Curve(line.label, [line.x[place] for place in indices], [line.y[place] for place in indices], errors)


def charts(named: Mapping[str, Sequence[Mapping[str, Any]]], score: str = "") -> list[Chart]:
    """Return the charts of one run, or of several on shared axes: reward, then standard charts, then other metrics.

    Args:
        named: rows of metrics by the run's name.
        score: the measure of held-out scores; empty if the runs differ in it.
    """
    several = len(named) > 1
    result = [
        _chart(REWARD_PANEL, "Reward", "", named, lambda rows: reward_curves(rows, score, apart=not several), several)
    ]
    known: set[str] = {REWARD, "grpo_loss/clip_fraction"}
    for panel in PANELS:
        known |= set(panel.series.values())
        result.append(_chart(panel.title, panel.title, panel.unit, named, _lines_of(panel), several))
    rest = dict.fromkeys(
        key
        for rows in named.values()
        for row in rows[-200:]
        for key in row
        if key not in known and key not in ("step", "time") and not key.startswith((TIME_PREFIX, "eval/"))
    )
    for key in sorted(rest, key=lambda name: (not name.startswith("reward/"), name)):
        result.append(_chart(key, key, "", named, _lines_of(Panel(key, {key.rpartition("/")[2]: key})), several))
        result[-1].known = False
    return [chart for chart in result if chart.curves]


def _lines_of(panel: Panel) -> Any:
    return lambda rows: (curve(rows, label, key) for label, key in panel.series.items())


def _chart(
    key: str, title: str, unit: str, named: Mapping[str, Sequence[Mapping[str, Any]]], lines: Any, several: bool
) -> Chart:
    chart = Chart(key, title, unit)
    for index, (name, rows) in enumerate(named.items()):
        for line in lines(rows):
            if line.x:
                line.label = f"{name}: {line.label}" if several else line.label
                chart.curves.append(line)
                chart.runs += [index] if several else []
    return chart


# ---
# Histograms

MOST_COLUMNS = 200
"""Maximum columns of a histogram chart; if there are more steps, several share a column."""
BINS = 10


def histograms(trained: Trained) -> list[Chart]:
    """Return histograms of the trained episodes' staleness, length and reward, one for each step."""
    steps = sorted(trained.steps)
    size = max(1, -(-len(steps) // MOST_COLUMNS))
    columns = [steps[at : at + size] for at in range(0, len(steps), size)]
    groups = [[group for step in column for group in trained.steps[step]] for column in columns]
    episodes = [[episode for group in column for episode in group.episodes] for column in groups]
    x = [float(column[0]) for column in columns]
    ages = [[float(group.staleness) for group in column for _ in group.episodes] for column in groups]
    lengths = [[float(episode.tokens) for episode in column] for column in episodes]
    rewards = [[episode.reward for episode in column] for column in episodes]
    result = [
        _strip("histogram/staleness", "Staleness of trained episodes", "policy updates", x, ages, whole=True),
        _strip("histogram/lengths", "Lengths of trained episodes", "tokens", x, lengths, whole=True),
        _strip("histogram/rewards", "Rewards of trained episodes", "", x, rewards),
    ]
    return [chart for chart in result if chart.curves]


def _strip(
    key: str, title: str, unit: str, x: list[float], columns: Sequence[Sequence[float]], *, whole: bool = False
) -> Chart:
    chart = Chart(key, title, unit, strip=True)
    values = [value for column in columns for value in column if math.isfinite(value)]
    if not values:
        return chart
    edges = _edges(min(values), max(values), whole=whole)
    shares = [[0.0] * (len(edges) - 1) for _ in columns]
    for share, column in zip(shares, columns, strict=True):
        for value in column:
            if math.isfinite(value):
                share[min(bisect_right(edges, value) - 1, len(share) - 1)] += 1 / len(column)
    for index, low in enumerate(edges[:-1]):
        high = edges[index + 1]
        last = index == len(edges) - 2
        span = f"{low:g}" if whole and high - low == 1 else f"{low:g} to {high if not whole or last else high - 1:g}"
        chart.curves.append(Curve(span, x, [share[index] for share in shares]))
    return chart


def _edges(low: float, high: float, *, whole: bool) -> list[float]:
    """Return the edges of at most `BINS` bins of equal width.

    For whole numbers, edges are whole, and each number has its own bin if there are few.
    """
    if whole:
        low = math.floor(low)
        width = max(1, math.ceil((high - low + 1) / BINS))
        return [float(low + width * index) for index in range(math.ceil((high - low + 1) / width) + 1)]
    if high - low < 1e-9:
        return [low, low + 1.0]
    return [_short(low + (high - low) * index / BINS) for index in range(BINS + 1)]


STYLE = """
svg { font: 12px system-ui, sans-serif; background: #fff; }
.grid { stroke: #e4e4de; } .tick { fill: #62625b; font-size: 11px; } .line { fill: none; stroke-width: 1.6; }
.title { fill: #1b1b19; font-weight: 600; font-size: 14px; }
""" + " ".join(
    f".line.c{index} {{ stroke: {colour}; }} .dot.c{index} {{ fill: {colour}; }}"
    for index, colour in enumerate(SERIES[:COLOURS])
)


def svg(chart: Chart, low: float | None = None, high: float | None = None) -> str:
    """Draw a chart from step `low` to `high` as a standalone SVG file of 960 by 394 pixels."""
    lines = [_cut(line if chart.strip else thinned(line), low, high) for line in chart.curves]
    lines = [line for line in lines if line.x]
    title = _escaped(chart.title + (f" ({chart.unit})" if chart.unit else ""))
    drawn = ""
    if chart.strip and lines:
        drawn = _cells(lines)
    elif lines:
        drawn = drawing(lines, 960, 360)
        title += "".join(
            f'<tspan fill="{SERIES[index % len(SERIES)]}" dx="14">{_escaped(line.label)}</tspan>'
            for index, line in enumerate(lines)
        )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="960" height="394" viewBox="0 -34 960 394">'
        f'<style>{STYLE}</style><text class="title" x="46" y="-10">{title}</text>{drawn}</svg>'
    )


def _cells(lines: Sequence[Curve]) -> str:
    """Draw a histogram for each step: a rectangle for each bin, darker for larger shares."""
    steps, left, width, height = lines[0].x, 90.0, 850.0, 334.0
    w, h = width / len(steps), height / len(lines)
    parts = []
    for row, line in enumerate(lines):
        top = height - (row + 1) * h
        parts.append(f'<text class="tick" x="{left - 6}" y="{top + 0.65 * h:.1f}" text-anchor="end">')
        parts.append(f"{_escaped(line.label)}</text>")
        parts += [
            f'<rect x="{left + column * w:.1f}" y="{top:.1f}" width="{w + 0.3:.1f}" height="{h:.1f}" '
            f'fill="{SERIES[0]}" fill-opacity="{share:.3f}"/>'
            for column, share in enumerate(line.y)
            if share
        ]
    for x, step in ((left, steps[0]), (left + width, steps[-1])):
        parts.append(f'<text class="tick" x="{x:.0f}" y="{height + 18:.0f}" text-anchor="middle">{step:g}</text>')
    return "".join(parts)


def _escaped(text: str) -> str:
    return escape(plain(text))


def _cut(line: Curve, low: float | None, high: float | None) -> Curve:
    indices = [p for p, x in enumerate(line.x) if (low is None or x >= low) and (high is None or x <= high)]
    errors = [line.error[index] for index in indices] if line.error else []
    return Curve(line.label, [line.x[index] for index in indices], [line.y[index] for index in indices], errors)


def table(chart: Chart) -> str:
    """Format a chart as CSV: a row for each step, a column for each line and each line's standard errors, if any."""
    columns: list[tuple[str, dict[float, float]]] = []
    for line in chart.curves:
        columns.append((line.label, dict(zip(line.x, line.y, strict=True))))
        if any(line.error):
            columns.append((f"{line.label}, standard error", dict(zip(line.x, line.error, strict=True))))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["step", *(_cell(name) for name, _ in columns)])
    for step in sorted({x for _, values in columns for x in values}):
        writer.writerow([f"{step:g}", *(values.get(step, "") for _, values in columns)])
    return out.getvalue()


def _cell(text: str) -> str:
    """Quote a name that spreadsheets would take for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
