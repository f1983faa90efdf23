"""The timeline of a run: timeline.json, read as it grows, and the part of it that a page shows."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from forge_env.display.curves import colour_of, is_waiting
from forge_env.reading import is_bounded
from forge_env.view.followed import Followed

MOST_EVENTS = 2_000_000
"""Maximum events of a timeline that are read: spans, counters and names of threads."""
LATEST = 1e12
"""Maximum seconds of a time."""
MOST_LANES = 64
"""Maximum rows for one track with concurrent spans."""
MANY = ("groups", "episodes", "sandboxes")
"""Suffixes of tracks with concurrent spans; they are drawn below the others."""
NARROW = 0.7
"""Width in pixels below which a span is merged with its neighbours."""


@dataclass(slots=True)
class Lane:
    """A row of the drawing."""

    track: str
    spans: list[tuple[float, float, int, str]] = field(default_factory=list)
    """Start and end in seconds, number of the activity, and id of its episode or group."""


@dataclass(slots=True)
class Phase:
    """Durations of one activity."""

    track: str
    name: str
    number: int
    total: float
    p50: float
    p90: float
    p99: float


@dataclass(slots=True)
class Bar:
    """The activities of one actor as shares of its time, from left to right."""

    actor: str
    parts: list[tuple[str, float, float, str]]
    """Name, start, share, and CSS class of the colour (`wait` is hatched)."""


class Timeline(Followed):
    """The events of one file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._names: list[tuple[str, bool]] = []
        """Activities, and whether they are waiting: an episode waits while its model generates."""
        self._begin_again()

    def _begin_again(self) -> None:
        self.spans: dict[str, list[tuple[float, float, str, str]]] = {}
        self.counters: dict[str, list[tuple[float, dict[str, float]]]] = {}
        self._threads: dict[Any, str] = {}
        self._open: dict[tuple[str, str, str], float] = {}
        self._number = self.damaged = 0
        self.begin, self.end = math.inf, 0.0
        """Start of the first span, at which the run's processes are running, and end of the last."""
        self._lanes: list[Lane] | None = None

    def _take(self, lines: Iterator[bytes]) -> None:
        for line in islice(lines, MOST_EVENTS - self._number):
            self._number += 1
            self._add_event(line.strip().strip(b",[]"))
            self._lanes = None

    def _add_event(self, line: bytes) -> None:
        if not line:
            return
        try:
            event = json.loads(line)
            kind = event["ph"]
            if kind == "M":
                if event["name"] == "thread_name":
                    self._threads[event["tid"]] = str(event["args"]["name"])
                return
            at = float(event["ts"]) / 1e6
            lasts = float(event["dur"]) / 1e6 if kind == "X" else 0.0
            if not (abs(at) < LATEST and abs(lasts) < LATEST):
                raise ValueError(f"{at} and {lasts} are not times")
            if kind == "X":
                self._add(self._threads.get(event["tid"], "?"), at, at + lasts, str(event["name"]), "")
            elif kind == "b":
                self._open[str(event["cat"]), str(event["id"]), str(event["name"])] = at
            elif kind == "e":
                key = (str(event["cat"]), str(event["id"]), str(event["name"]))
                if (start := self._open.pop(key, None)) is not None:
                    self._add(key[0], start, at, key[2], key[1])
            elif kind == "C":
                values = {str(name): float(value) for name, value in event["args"].items()}
                if not all(map(is_bounded, values.values())):
                    raise ValueError("a counter is too large")
                self.counters.setdefault(str(event["name"]), []).append((at, values))
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
            self.damaged += 1

    def _add(self, track: str, start: float, end: float, name: str, whose: str) -> None:
        self.spans.setdefault(track, []).append((start, max(start, end), name, whose))
        self.begin, self.end = min(self.begin, max(start, 0.0)), max(self.end, end)

    def lanes(self) -> list[Lane]:
        """Return the rows of the drawing: the trainer first, then tracks without overlaps, then episodes and groups."""
        with self._lock:
            if self._lanes is None:
                self._names = sorted(
                    {_activity(track, name) for track, spans in self.spans.items() for _, _, name, _ in spans}
                )
                number = {activity: index for index, activity in enumerate(self._names)}
                lanes: list[Lane] = []
                for track in sorted(self.spans, key=_rank):
                    lanes += _packed(track, self.spans[track], number)
                self._lanes = lanes
            return self._lanes

    def window(self, low: float | None, high: float | None, width: int) -> dict[str, Any]:
        """Return the visible part of `low` to `high` seconds at `width` pixels; None: the first span, or the end."""
        begin = min(self.begin, self.end)
        low = begin if low is None else max(begin, low)
        high = self.end if high is None or high <= low else min(high, self.end)
        width = min(max(width, 100), 6000)
        pixel = max(high - low, 1e-9) / width
        lanes = []
        for lane in self.lanes():
            drawn: list[list[Any]] = []
            within: dict[int, float] = {}
            for start, end, name, owner in lane.spans:
                if end < low or start > high:
                    continue
                last = drawn[-1] if drawn else None
                if (
                    last is not None
                    and end - start < NARROW * pixel
                    and start - last[1] < pixel
                    and last[1] - last[0] < 3 * pixel
                ):
                    last[1] = max(last[1], end)
                    within[name] = within.get(name, 0.0) + end - start
                    last[2] = max(within, key=within.__getitem__)  # shows the activity that took the most time
                    continue
                within = {name: end - start}
                drawn.append([round(start, 5), round(end, 5), name, owner])
            lanes.append({"track": named(lane.track), "many": lane.track.endswith(MANY), "spans": drawn})
        counters = [
            {
                "name": name,
                "points": _thin([(at, sum(values.values())) for at, values in points if low <= at <= high], width // 2),
            }
            for name, points in sorted(self.counters.items())
        ]
        names = [{"name": name, "wait": wait, "css": css_of(name)} for name, wait in self._names]
        whole = {"low": low, "high": high, "begin": begin, "end": self.end}
        return {**whole, "names": names, "lanes": lanes, "counters": counters}

    def phases(self) -> list[Phase]:
        """Return the durations of the activities of episodes and trainer, those with the most time first."""
        seconds: dict[tuple[str, str], list[float]] = {}
        for track, spans in self.spans.items():
            if track.endswith("groups"):
                continue
            for start, end, name, _ in spans:
                seconds.setdefault((track, name), []).append(end - start)
        result = []
        ranks = {named(track): _rank(track) for track in self.spans}
        for (track, name), values in seconds.items():
            values.sort()
            quantiles = [values[min(len(values) - 1, int(share * len(values)))] for share in (0.5, 0.9, 0.99)]
            result.append(Phase(named(track), name, len(values), sum(values), *quantiles))
        return sorted(result, key=lambda phase: (ranks[phase.track], -phase.total))


def _rank(track: str) -> tuple[int, str]:
    order = ("trainer", "generator", "reference", "buffer")
    position = next((number for number, name in enumerate(order) if track.startswith(name)), len(order))
    kind = next((number for number, name in enumerate(MANY, start=1) if track.endswith(name)), 0)
    return (position + 10 * kind, track)


def _activity(track: str, name: str) -> tuple[str, bool]:
    """Return the activity that a span shows, and whether its actor is waiting."""
    if name.startswith("group "):
        return "group", False
    return name, is_waiting("episodes" if track.endswith("episodes") else "", name)


def named(track: str) -> str:
    """Format a track for people: `episodes, worker 0`."""
    return re.sub(r"^rollouts(\d+)( on [^:]*)?: (\w+)$", r"\3, worker \1\2", track)


def _packed(
    track: str, spans: Sequence[tuple[float, float, str, str]], number: Mapping[tuple[str, bool], int]
) -> list[Lane]:
    """Pack a track's spans into as few rows as possible; those of one episode share a row."""
    lanes: list[Lane] = []
    ends: list[float] = []
    by_key: dict[str, list[tuple[float, float, str, str]]] = {}
    single: list[list[tuple[float, float, str, str]]] = []
    for span in spans:
        if span[3]:
            by_key.setdefault(span[3], []).append(span)
        else:
            single.append([span])
    blocks = sorted([*by_key.values(), *single], key=lambda block: block[0][0])
    for block in blocks:
        start, end = block[0][0], max(span[1] for span in block)
        row = next((lane for lane, until in enumerate(ends) if until <= start + 1e-6), None)
        if row is None:
            if len(lanes) >= MOST_LANES:
                continue
            lanes.append(Lane(track))
            ends.append(0.0)
            row = len(lanes) - 1
        ends[row] = end
        lanes[row].spans += [
            (
                start,
                end,
                number[_activity(track, name)],
                name if name.startswith("group ") else owner,
            )
            for start, end, name, owner in block
        ]
    return lanes


def _thin(points: Sequence[tuple[float, float]], most: int) -> list[list[float]]:
    step = max(1, len(points) // max(1, most))
    return [[round(at, 3), float(f"{value:.4g}")] for at, value in points[::step]]


def css_of(doing: str, actor: str = "") -> str:
    """Return the CSS class of an activity's colour; `wait` is hatched."""
    return "wait" if is_waiting(actor, doing) else f"s{colour_of(doing)}"


def bars(accounts: Mapping[str, Mapping[str, float]]) -> list[Bar]:
    """Return a bar for each actor; an activity has the same colour in all bars, and waiting is hatched."""
    result = []
    for actor in sorted(accounts, key=_rank):
        parts, start = [], 0.0
        for name, share in sorted(accounts[actor].items(), key=lambda item: -item[1]):
            parts.append((name, start, share, css_of(name, actor)))
            start += share
        result.append(Bar(actor, parts))
    return result
