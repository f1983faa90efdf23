"""How long the phases of a pool take, over its most recent events."""

from __future__ import annotations

from collections import defaultdict, deque

_WINDOW = 1024


class Phases:
    """Durations by phase; percentiles over the last thousand of each."""

    def __init__(self) -> None:
        self._times: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_WINDOW))

    def add(self, phase: str, seconds: float) -> None:
        """Record one duration."""
        self._times[phase].append(seconds)

    def summary(self) -> dict[str, dict[str, float]]:
        """`{phase: {"p50_ms": ..., "p95_ms": ..., "n": ...}}`."""
        found = {}
        for phase, times in self._times.items():
            ordered = sorted(times)
            found[phase] = {
                "p50_ms": ordered[len(ordered) // 2] * 1e3,
                "p95_ms": ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))] * 1e3,
                "n": float(len(ordered)),
            }
        return found
