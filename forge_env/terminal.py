"""Progress of a run or an evaluation on a terminal, in a pipe or in a log.

A `View` can be drawn as one line and as a panel. A display subscribes to events (`forge_env.events`) and draws the
view: live on a terminal, in sparse lines elsewhere. The publisher's thread
draws, since the view changes in its event loop.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, TextIO

from forge_env.events import Subscriber
from forge_env.figures import duration
from forge_env.visible import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

QUIET_S = 15.0
"""Minimum seconds between plain lines of progress."""
REDRAW_S = 0.25
"""Minimum seconds between redraws of the live panel."""


class View(Protocol):
    """The content of a display."""

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""

    def line(self) -> str | None:
        """Return the progress in one line; None while there is nothing to report."""

    def panel(self) -> RenderableType:
        """Return the whole view as a rich renderable."""


class PlainDisplay(Subscriber):
    """Plain lines for important events, each with the time since the start in front."""

    def __init__(self, view: View, stream: TextIO) -> None:
        self._view = view
        self._stream = stream
        self._last = 0.0

    def update(self) -> None:
        """Write the view's line, unless another line was written recently."""
        if self._view.elapsed - self._last >= QUIET_S and (text := self._view.line()) is not None:
            self.event(text)

    def event(self, text: str) -> None:
        """Write the text."""
        self._last = self._view.elapsed
        self.note(text)

    def note(self, text: str) -> None:
        """Write the text."""
        self._stream.write(f"[{duration(self._view.elapsed):>7}] {visible(text)}\n")
        self._stream.flush()


class LiveDisplay(Subscriber):
    """A panel that is redrawn a few times a second; notes scroll by above it."""

    def __init__(self, view: View, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        class Plain(Console):
            def on_broken_pipe(self) -> None:  # rich's own ends the program
                raise BrokenPipeError("the reader has closed the pipe")

        self._view = view
        self._last = -math.inf
        self._live = Live(
            get_renderable=view.panel,
            console=Plain(file=stream, highlight=False, emoji=False),
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def update(self) -> None:
        """Redraw, unless that was just done."""
        now = self._view.elapsed
        if now - self._last >= REDRAW_S:
            self._last = now
            self._draw()

    def event(self, text: str) -> None:
        """Redraw now: the work that follows may block the event loop."""
        self._draw()

    def note(self, text: str) -> None:
        """Print a line above the panel."""
        from rich.markup import escape

        self._live.console.print(f"[dim]{duration(self._view.elapsed):>7}[/] {escape(visible(text))}", soft_wrap=True)

    def close(self) -> None:
        """Redraw once more and leave the panel on the screen."""
        self._live.stop()

    def _draw(self) -> None:
        self._live.start()
        self._live.refresh()


def open_display(view: View, stream: TextIO, *, live: bool = True) -> PlainDisplay | LiveDisplay:
    """Open the display that fits the stream: live on a terminal if `live` allows it, else plain."""
    return LiveDisplay(view, stream) if live and stream.isatty() else PlainDisplay(view, stream)
