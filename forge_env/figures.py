"""Numbers, durations, shares and states as short text, the same on terminals and pages, in reports and pictures."""

from __future__ import annotations

import math

NONE = "\u2013"
"""Text of a value that is not known."""


def number(value: float | None, digits: int = 3) -> str:
    """Format a number in few characters: 1,204; 12.3k; 2M; 0.25; 1e-06."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for limit, factor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / factor:.{digits}g}{unit}"
    return f"{value:,.0f}" if size >= 1000 or value == int(value) else f"{value:.{digits}g}"


def count(value: float | None) -> str:
    """Format a whole number with thousands separators."""
    return NONE if value is None else f"{int(value):,}"


def duration(seconds: float | None, *, fine: bool = False) -> str:
    """Format a duration: 8.3s, 2m05s, 1h04m, 2d03h; with `fine`, milliseconds below a second: 120ms."""
    if seconds is None:
        return NONE
    if fine and abs(seconds) < 0.9995:
        return f"{1000 * seconds:.3g}ms"
    if not 59.95 <= seconds < math.inf:  # also NaN, from a damaged file
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return (
        f"{minutes // 60}h{minutes % 60:02d}m" if minutes < 1440 else f"{minutes // 1440}d{minutes % 1440 // 60:02d}h"
    )


def ago(seconds: float) -> str:
    """Format an age: 12 s ago, 47 min ago, 3 h ago, 5 days ago."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size or (unit == "min" and seconds >= size):
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(seconds, 0.0):.0f} s ago"


def percent(share: float) -> str:
    """Format a share: 54 %, 0.4 %."""
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def state(recorded: str) -> str:
    """Name the recorded state of a run or an evaluation for people: both "success" and "complete" are "finished"."""
    return {"success": "finished", "complete": "finished"}.get(recorded, recorded)


def signed(value: float | None, digits: int = 2) -> str:
    """Format a change with its sign, using a true minus sign."""
    return NONE if value is None else f"{value:+.{digits}f}".replace("-", "\u2212")
