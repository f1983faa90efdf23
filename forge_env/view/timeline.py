"""Who did what when: a run's timeline.json, read as it grows, and the stretch of it that a page shows."""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_env.display.curves import is_waiting

MOST_OPEN = 4
MOST_SPANS = 2_000_000
MOST_LANES = 64
"""Rows of one track on which much goes on at once."""
NARROW = 0.7
"""Pixels; what is narrower is drawn together with its neighbours."""


@dataclass(slots=True)
class Lane:
    """A row of the drawing."""

    track: str
    spans: list[tuple[float, float, int, str]] = field(default_factory=list)
    """Start and end in seconds, the number of the activity, and whose it is."""


@dataclass(slots=True)
class Phase:
    """How long one activity takes."""

    track: str
    name: str
    number: int
    total: float
    p50: float
    p90: float
    p99: float


@dataclass(slots=True)
class Bar:
    """What one actor did, as shares of its time; from left to right."""

    actor: str
    parts: list[tuple[str, float, float, str]]
    """Name, where it begins, its share, and the class of its colour (`wait` is hatched)."""


class Timeline:
    """The events of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spans: dict[str, list[tuple[float, float, str, str]]] = {}
        self.counters: dict[str, list[tuple[float, dict[str, float]]]] = {}
        self.damaged = 0
        self.end = 0.0
        self._threads: dict[Any, str] = {}
        self._open: dict[tuple[str, str, str], float] = {}
        self._read = 0
        self._inode = 0
        self._number = 0
        self._lock = threading.Lock()
        self._lanes: list[Lane] | None = None
        self._names: list[str] = []

    def update(self) -> None:
        """Read what was written since."""
        with self._lock:
            try:
                with self.path.open("rb") as file:
                    found = os.fstat(file.fileno())
                    if found.st_ino != self._inode or found.st_size < self._read:
                        self.spans, self.counters, self._threads, self._open = {}, {}, {}, {}
                        self._read, self._inode, self._number, self.end, self.damaged = 0, found.st_ino, 0, 0.0, 0
                        self._lanes = None
                    if found.st_size == self._read:
                        return
                    file.seek(self._read)
                    for line in file:
                        if not line.endswith(b"\n"):
                            break
                        self._read += len(line)
                        self._take(line.strip().strip(b",[]"))
                    self._lanes = None
            except OSError:
                return

    def _take(self, line: bytes) -> None:
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
            if not abs(at) < 1e12:
                raise ValueError(f"{at} is no time")
            if kind == "X":
                self._add(
                    self._threads.get(event["tid"], "?"), at, at + float(event["dur"]) / 1e6, str(event["name"]), ""
                )
            elif kind == "b":
                self._open[str(event["cat"]), str(event["id"]), str(event["name"])] = at
            elif kind == "e":
                key = (str(event["cat"]), str(event["id"]), str(event["name"]))
                if (start := self._open.pop(key, None)) is not None:
                    self._add(key[0], start, at, key[2], key[1])
            elif kind == "C":
                values = {str(name): float(value) for name, value in event["args"].items()}
                self.counters.setdefault(str(event["name"]), []).append((at, values))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            self.damaged += 1

    def _add(self, track: str, start: float, end: float, name: str, whose: str) -> None:
        if self._number < MOST_SPANS:
            self._number += 1
            self.spans.setdefault(track, []).append((start, max(start, end), name, whose))
            self.end = max(self.end, end)

    def lanes(self) -> list[Lane]:
        """The rows of the drawing: the trainer first, then what doesn't overlap, then episodes and groups."""
        with self._lock:
            if self._lanes is None:
                self._names = sorted(
                    {
                        name if not name.startswith("group ") else "group"
                        for spans in self.spans.values()
                        for _, _, name, _ in spans
                    }
                )
                number = {name: place for place, name in enumerate(self._names)}
                found: list[Lane] = []
                for track in sorted(self.spans, key=_rank):
                    found += _packed(track, self.spans[track], number)
                self._lanes = found
            return self._lanes

    def window(self, low: float | None, high: float | None, width: int) -> dict[str, Any]:
        """What can be seen of the stretch from `low` to `high` seconds on `width` pixels."""
        low = max(0.0, low or 0.0)
        high = self.end if high is None or high <= low else min(high, self.end)
        width = min(max(width, 100), 6000)
        pixel = max(high - low, 1e-9) / width
        lanes = []
        for lane in self.lanes():
            drawn: list[list[Any]] = []
            within: dict[int, float] = {}
            for start, end, name, whose in lane.spans:
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
                    last[2] = max(within, key=within.__getitem__)  # of what is drawn as one, what took the most time
                    continue
                within = {name: end - start}
                drawn.append([round(start, 5), round(end, 5), name, whose])
            lanes.append({"track": lane.track, "spans": drawn})
        counters = [
            {
                "name": name,
                "points": _thin([(at, sum(values.values())) for at, values in points if low <= at <= high], width // 2),
            }
            for name, points in sorted(self.counters.items())
        ]
        names = [{"name": name, "wait": is_waiting("", name), "css": css_of(name)} for name in self._names]
        return {"low": low, "high": high, "end": self.end, "names": names, "lanes": lanes, "counters": counters}

    def phases(self) -> list[Phase]:
        """How long the activities of episodes and of the trainer take, those with the most time first."""
        seconds: dict[tuple[str, str], list[float]] = {}
        for track, spans in self.spans.items():
            if track.endswith("groups"):
                continue
            for start, end, name, _ in spans:
                seconds.setdefault((track, name), []).append(end - start)
        found = []
        for (track, name), values in seconds.items():
            values.sort()
            quantiles = [values[min(len(values) - 1, int(share * len(values)))] for share in (0.5, 0.9, 0.99)]
            found.append(Phase(track, name, len(values), sum(values), *quantiles))
        return sorted(found, key=lambda phase: (_rank(phase.track), -phase.total))


def _rank(track: str) -> tuple[int, str]:
    order = ("trainer", "generator", "reference", "buffer")
    place = next((number for number, name in enumerate(order) if track.startswith(name)), len(order))
    return (place + (track.endswith("groups") + 2 * track.endswith("episodes")) * 10, track)


def _packed(track: str, spans: Sequence[tuple[float, float, str, str]], number: Mapping[str, int]) -> list[Lane]:
    """A track's spans on as few rows as hold them; those of one episode stay on one."""
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
        place = next((lane for lane, until in enumerate(ends) if until <= start + 1e-6), None)
        if place is None:
            if len(lanes) >= MOST_LANES:
                continue
            lanes.append(Lane(track))
            ends.append(0.0)
            place = len(lanes) - 1
        ends[place] = end
        lanes[place].spans += [
            (
                start,
                end,
                number["group" if name.startswith("group ") else name],
                name if name.startswith("group ") else whose,
            )
            for start, end, name, whose in block
        ]
    return lanes


def _thin(points: Sequence[tuple[float, float]], most: int) -> list[list[float]]:
    step = max(1, len(points) // max(1, most))
    return [[round(at, 3), float(f"{value:.4g}")] for at, value in points[::step]]


class Timelines:
    """The timelines that were looked at last."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, Timeline] = OrderedDict()

    def of(self, root: Path) -> Timeline:
        """A run's, as it stands."""
        path = root / "timeline.json"
        found = self._open.setdefault(path, Timeline(path))
        self._open.move_to_end(path)
        while len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)
        found.update()
        return found


SERIES = {
    "generate": 0, "train": 1, "environment": 2, "push weights": 3, "load weights": 3, "save": 4, "book-keeping": 5,
    "start": 5, "reset": 3, "close": 5, "busy": 0, "group": 0, "score": 4, "add": 0, "sample": 2, "release": 4,
}  # fmt: skip
"""The colour of each kind of work, the same everywhere; two that share one never stand in one bar at length."""


def css_of(doing: str, actor: str = "") -> str:
    """The class of an activity's colour; `wait` is hatched."""
    return "wait" if is_waiting(actor, doing) else f"s{SERIES.get(doing, sum(doing.encode()) % 6)}"


def bars(accounts: Mapping[str, Mapping[str, float]]) -> list[Bar]:
    """A bar an actor; an activity has one colour in all of them, and waiting is hatched."""
    found = []
    for actor in sorted(accounts, key=_rank):
        parts, start = [], 0.0
        for name, share in sorted(accounts[actor].items(), key=lambda item: -item[1]):
            parts.append((name, start, share, css_of(name, actor)))
            start += share
        found.append(Bar(actor, parts))
    return found
