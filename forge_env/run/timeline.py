"""timeline.json: what every actor did when, in the trace-event format that Perfetto and chrome://tracing open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format)

Written as it happens, one event a line; a file that a killed process left without its closing bracket opens too.
"""

from __future__ import annotations

import itertools
import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

MICROSECONDS = 1e6
log = logging.getLogger(__name__)


def keep_earlier(path: Path) -> None:
    """Give the file of an earlier session, where there is one, the next free name: `timeline-1.json`, ..."""
    if path.exists():
        names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))


class Timeline:
    """Appends events to a file; times are seconds of one clock, counted from `start`."""

    def __init__(self, path: Path, start: float) -> None:
        self._start = start
        self._tracks: dict[str, int] = {}
        self._file = path.open("w", encoding="utf-8")
        self._file.write("[")
        self._first = True

    def span(self, track: str, name: str, start: float, end: float, **details: Any) -> None:
        """`track` did `name` from `start` to `end`; spans of one track don't overlap."""
        self._event(track, ph="X", name=name, ts=self._us(start), dur=(end - start) * MICROSECONDS, args=details)

    def overlapping(self, track: str, key: str, name: str, start: float, end: float, **details: Any) -> None:
        """As `span`, for things of which many go on at once; those of one `key` nest."""
        common = {"cat": track, "id": key, "name": name}
        self._event(track, ph="b", ts=self._us(start), args=details, **common)
        self._event(track, ph="e", ts=self._us(end), **common)

    def counter(self, name: str, at: float, **values: float) -> None:
        """Figures as a curve."""
        self._event(name, ph="C", name=name, ts=self._us(at), args=values)

    def close(self) -> None:
        """End the file."""
        self._add("\n]\n")
        with suppress(OSError):
            self._file.close()

    def _us(self, at: float) -> float:
        return round((at - self._start) * MICROSECONDS, 1)

    def _event(self, track: str, **event: Any) -> None:
        thread = self._tracks.get(track)
        if thread is None:
            thread = self._tracks[track] = len(self._tracks) + 1
            self._write({"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": track}})
        self._write({"pid": 1, "tid": thread, **event})

    def _write(self, event: dict[str, Any]) -> None:
        self._add(("\n" if self._first else ",\n") + json.dumps(event, separators=(",", ":")))
        self._first = False

    def _add(self, text: str) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(text)
        except OSError as error:  # a full disk: the timeline ends here, the run goes on
            log.warning("the timeline ends here: %s", error)
            with suppress(OSError):
                self._file.close()
