"""timeline.json: the activities of all actors, in the trace-event format that Perfetto and chrome://tracing open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format)

Events are written as they happen, one a line; a file without its closing bracket, left by a killed process, opens too.
While the disk is full, events wait in memory up to a bound; those beyond it are dropped.
"""

from __future__ import annotations

import itertools
import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from forge_env.files import DiskFullError, LineWriter

MICROSECONDS = 1e6
MOST_HELD = 8 * 2**20
"""Maximum bytes of events that wait in memory for disk space."""


def keep_earlier(path: Path) -> None:
    """Rename an existing timeline of an earlier session to the next free name: `timeline-1.json`, ..."""
    if path.exists():
        names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))


class Span(NamedTuple):
    """One of many concurrent spans, to be shown by `Timeline.overlapping`."""

    track: str
    key: str
    name: str
    start: float
    end: float


class Timeline:
    """Append events to a file; times are seconds of one clock, counted from `start`."""

    def __init__(self, path: Path, start: float) -> None:
        self._start = start
        self._tracks: dict[str, int] = {}
        self._file = LineWriter(path, what="events", most_held=MOST_HELD)
        self._open = True
        self._file.append(b'[{"ph":"M","pid":1,"tid":0,"name":"process_name","args":{"name":"run"}}')

    def span(self, track: str, name: str, start: float, end: float, **details: Any) -> None:
        """Record that `track` did `name` from `start` to `end`; spans of one track don't overlap.

        Both ends are rounded to whole microseconds, so that a span ends exactly where the next begins: Perfetto drops
        spans that overlap, even by a nanosecond.
        """
        begun = self._us(start)
        self._event(track, ph="X", name=name, ts=begun, dur=self._us(end) - begun, args=details)

    def overlapping(self, track: str, key: str, name: str, start: float, end: float, **details: Any) -> None:
        """Record a span that may overlap others of its track; spans of one `key` nest."""
        common = {"cat": track, "id": key, "name": name}
        self._event(track, ph="b", ts=self._us(start), args=details, **common)
        self._event(track, ph="e", ts=self._us(end), **common)

    def counter(self, name: str, at: float, **values: float) -> None:
        """Record figures as a curve."""
        self._event(name, ph="C", name=name, ts=self._us(at), args=values)

    def move(self, path: Path) -> None:
        """Continue in another file (see `LineWriter.move`)."""
        if self._open:
            self._file.move(path)

    def close(self) -> None:
        """Close the file; later events are ignored."""
        if self._open:
            self._open = False
            self._file.append(b"]")
            with suppress(DiskFullError):
                self._file.close()

    def _us(self, at: float) -> int:
        return round((at - self._start) * MICROSECONDS)

    def _event(self, track: str, **event: Any) -> None:
        thread = self._tracks.get(track)
        if thread is None:
            thread = self._tracks[track] = len(self._tracks) + 1
            self._write({"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": track}})
        self._write({"pid": 1, "tid": thread, **event})

    def _write(self, event: dict[str, Any]) -> None:
        if self._open:
            self._file.append(b"," + json.dumps(event, separators=(",", ":")).encode())
